#include "../native/handler.h"
#include "attention.h"

namespace jaxspec {
namespace {

// `key` and `value` are updated in place: the results are the same buffers as the arguments.
ffi::Error run_tree_attention(ffi::ThreadPool pool, Floats qkv, ffi::AnyBuffer key, ffi::AnyBuffer value, Scalar length,
                              Scalar offset, Scalar active_rows, ffi::Buffer<ffi::PRED> mask, Ints position, Floats cos,
                              Floats sin, Floats sinks, ffi::ResultBuffer<ffi::F32> out,
                              ffi::Result<ffi::AnyBuffer> new_key, ffi::Result<ffi::AnyBuffer> new_value, bool causal,
                              bool write_only, int64_t sliding, float softcap, int64_t threads) {
  const auto sizes = qkv.dimensions(), cache = key.dimensions();
  if (new_key->untyped_data() != key.untyped_data() || new_value->untyped_data() != value.untyped_data())
    return ffi::Error::Internal("tree_attention: the cache is not updated in place");
  if (sizes[0] == 0 || sizes[1] == 0) return ffi::Error::Success();
  AttentionShape s;
  s.rows = count_active_rows(active_rows, sizes[0]);
  s.kv_heads = sizes[1];
  s.group = sizes[2] - 2;
  s.width = sizes[3];
  s.slots = cache[1];
  s.window = mask.dimensions()[1];
  s.length = *length.typed_data();
  s.offset = *offset.typed_data();
  s.sliding = sliding;
  s.softcap = softcap;
  if (const int64_t count = static_cast<int64_t>(sinks.element_count())) {
    if (count != s.kv_heads * s.group) return invalid("tree_attention: there must be a sink for each query head");
    s.sinks = sinks.typed_data();
  }
  const uint8_t* marked = causal ? nullptr : reinterpret_cast<const uint8_t*>(mask.typed_data());
  CacheType type;
  switch (key.element_type()) {
    case ffi::F32: type = CacheType::kFloat32; break;
    case ffi::BF16: type = CacheType::kBFloat16; break;
    case ffi::F16: type = CacheType::kFloat16; break;
    default: return invalid("tree_attention: the cache is neither float32, bfloat16 nor float16");
  }
  XlaThreads workers(pool);
  const char* wrong = tree_attention(
      type, workers, threads, s, qkv.typed_data(), cos.typed_data(), sin.typed_data(), marked, position.typed_data(),
      static_cast<uint8_t*>(new_key->untyped_data()), static_cast<uint8_t*>(new_value->untyped_data()),
      write_only ? nullptr : out->typed_data());
  if (wrong) return invalid(wrong);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

JAXSPEC_HANDLER(jaxspec_tree_attention, jaxspec::run_tree_attention,
                xla::ffi::Ffi::Bind()
                    .Ctx<xla::ffi::ThreadPool>()
                    .Arg<jaxspec::Floats>()
                    .Arg<xla::ffi::AnyBuffer>()
                    .Arg<xla::ffi::AnyBuffer>()
                    .Arg<jaxspec::Scalar>()
                    .Arg<jaxspec::Scalar>()
                    .Arg<jaxspec::Scalar>()
                    .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                    .Arg<jaxspec::Ints>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Floats>()
                    .Ret<jaxspec::Floats>()
                    .Ret<xla::ffi::AnyBuffer>()
                    .Ret<xla::ffi::AnyBuffer>()
                    .Attr<bool>("causal")
                    .Attr<bool>("write_only")
                    .Attr<int64_t>("sliding")
                    .Attr<float>("softcap")
                    .Attr<int64_t>("threads"));
