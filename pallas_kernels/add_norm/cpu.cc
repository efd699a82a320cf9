#include "../native/handler.h"
#include "../rms_norm/rms_norm.h"

namespace jaxspec {
namespace {

// total = x + the sum of the parts, normed = `rms_norm` of that; of the active rows alone.
ffi::Error run_add_norm(Floats x, Floats parts, Floats scale, Scalar active_rows, ffi::ResultBuffer<ffi::F32> total,
                        ffi::ResultBuffer<ffi::F32> normed, float epsilon) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1], count = count_active_rows(active_rows, rows);
  const int64_t size = rows * width;
  float* to = total->typed_data();
  add_parts(x.typed_data(), parts.typed_data(), parts.dimensions()[0], size, count * width, to);
  if (width) rms_norm(to, scale.typed_data(), epsilon, count, width, normed->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

JAXSPEC_HANDLER(jaxspec_add_norm, jaxspec::run_add_norm,
                xla::ffi::Ffi::Bind()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Scalar>()
                    .Ret<jaxspec::Floats>()
                    .Ret<jaxspec::Floats>()
                    .Attr<float>("epsilon"));
