#include "../native/handler.h"
#include "delta_rule.h"

namespace jaxspec {
namespace {

// `key`, `value` and `decay` of the kept rows are updated in place: the results are the same buffers as the arguments.
ffi::Error run_delta_rule(ffi::ThreadPool pool, Floats query, Floats key, Floats value, Floats decay, Floats rate,
                          ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::PRED> late, Floats state, Floats kept_key,
                          Floats kept_value, Floats kept_decay, Scalar first, Scalar offset, Scalar active_rows,
                          ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> new_key,
                          ffi::ResultBuffer<ffi::F32> new_value, ffi::ResultBuffer<ffi::F32> new_decay, int64_t block,
                          int64_t threads) {
  if (new_key->untyped_data() != kept_key.untyped_data() || new_value->untyped_data() != kept_value.untyped_data() ||
      new_decay->untyped_data() != kept_decay.untyped_data())
    return ffi::Error::Internal("delta_rule: the kept rows are not updated in place");
  const auto sizes = value.dimensions();
  DeltaShape s;
  s.rows = count_active_rows(active_rows, sizes[0]);
  s.heads = sizes[1], s.group = sizes[2], s.value_width = sizes[3];
  s.key_width = key.dimensions()[2];
  s.kept = kept_key.dimensions()[1];
  s.window = mask.dimensions()[1];
  s.first = *first.typed_data();
  s.place = s.first + *offset.typed_data();
  s.block = block;
  XlaThreads workers(pool);
  const char* wrong = delta_rule(
      workers, threads, s, query.typed_data(), key.typed_data(), value.typed_data(), decay.typed_data(),
      rate.typed_data(), reinterpret_cast<const uint8_t*>(mask.typed_data()),
      reinterpret_cast<const uint8_t*>(late.typed_data()), state.typed_data(),
      {new_key->typed_data(), new_value->typed_data(), new_decay->typed_data()}, out->typed_data());
  if (wrong) return invalid(wrong);
  const int64_t row = s.heads * s.group * s.value_width;
  clear(out->typed_data() + s.rows * row, (sizes[0] - s.rows) * row);
  return ffi::Error::Success();
}

// `state` is updated in place.
ffi::Error run_delta_fold(ffi::ThreadPool pool, Floats kept_key, Floats kept_value, Floats kept_decay, Floats state,
                          ffi::ResultBuffer<ffi::F32> folded, int64_t block, int64_t threads) {
  if (folded->untyped_data() != state.untyped_data())
    return ffi::Error::Internal("delta_fold: the state is not updated in place");
  const auto sizes = kept_key.dimensions();
  DeltaShape s{};
  s.heads = sizes[0], s.kept = sizes[1], s.key_width = sizes[2];
  s.group = kept_decay.dimensions()[2];
  if (block > s.kept || s.group < 1) return invalid("delta_fold: there are fewer rows than a block");
  s.value_width = kept_value.dimensions()[2] / s.group;
  s.block = block;
  XlaThreads workers(pool);
  delta_fold(workers, threads, s, {kept_key.typed_data(), kept_value.typed_data(), kept_decay.typed_data()},
             folded->typed_data());
  return ffi::Error::Success();
}

ffi::Error run_short_conv(ffi::ThreadPool pool, Floats weight, Floats kept, Floats x, Ints before, Scalar place,
                          Scalar active_rows, ffi::ResultBuffer<ffi::F32> out, bool silu, int64_t threads) {
  const auto sizes = x.dimensions();
  ConvShape s;
  s.rows = count_active_rows(active_rows, sizes[0]);
  s.heads = sizes[1], s.width = sizes[2];
  s.taps = weight.dimensions()[2];
  s.kept = kept.dimensions()[1];
  s.place = *place.typed_data();
  s.silu = silu;
  if (s.place < 0 || s.place > s.kept) return invalid("short_conv: the rows do not follow kept ones");
  for (int64_t tap = 0; tap + 1 < s.taps; tap++)
    for (int64_t t = 0; t < s.rows; t++)
      if (before.typed_data()[tap * sizes[0] + t] >= s.place + t) return invalid("short_conv: a row comes before itself");
  XlaThreads workers(pool);
  short_conv(workers, threads, s, weight.typed_data(), kept.typed_data(), x.typed_data(), before.typed_data(), sizes[0],
             out->typed_data());
  const int64_t row = s.heads * s.width;
  clear(out->typed_data() + s.rows * row, (sizes[0] - s.rows) * row);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

JAXSPEC_HANDLER(jaxspec_delta_rule, jaxspec::run_delta_rule,
                xla::ffi::Ffi::Bind()
                    .Ctx<xla::ffi::ThreadPool>()
                    .Arg<jaxspec::Floats>().Arg<jaxspec::Floats>().Arg<jaxspec::Floats>().Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Floats>()
                    .Arg<xla::ffi::Buffer<xla::ffi::PRED>>().Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                    .Arg<jaxspec::Floats>().Arg<jaxspec::Floats>().Arg<jaxspec::Floats>().Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Scalar>().Arg<jaxspec::Scalar>().Arg<jaxspec::Scalar>()
                    .Ret<jaxspec::Floats>().Ret<jaxspec::Floats>().Ret<jaxspec::Floats>().Ret<jaxspec::Floats>()
                    .Attr<int64_t>("block").Attr<int64_t>("threads"));

JAXSPEC_HANDLER(jaxspec_delta_fold, jaxspec::run_delta_fold,
                xla::ffi::Ffi::Bind()
                    .Ctx<xla::ffi::ThreadPool>()
                    .Arg<jaxspec::Floats>().Arg<jaxspec::Floats>().Arg<jaxspec::Floats>().Arg<jaxspec::Floats>()
                    .Ret<jaxspec::Floats>()
                    .Attr<int64_t>("block").Attr<int64_t>("threads"));

JAXSPEC_HANDLER(jaxspec_short_conv, jaxspec::run_short_conv,
                xla::ffi::Ffi::Bind()
                    .Ctx<xla::ffi::ThreadPool>()
                    .Arg<jaxspec::Floats>().Arg<jaxspec::Floats>().Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Ints>()
                    .Arg<jaxspec::Scalar>().Arg<jaxspec::Scalar>()
                    .Ret<jaxspec::Floats>()
                    .Attr<bool>("silu").Attr<int64_t>("threads"));
