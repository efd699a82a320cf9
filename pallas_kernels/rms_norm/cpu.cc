#include "../native/handler.h"
#include "rms_norm.h"

namespace jaxspec {
namespace {

ffi::Error run_rms_norm(Floats x, Floats scale, ffi::ResultBuffer<ffi::F32> y, float epsilon) {
  const int64_t width = static_cast<int64_t>(scale.element_count());
  if (width == 0) return ffi::Error::Success();
  rms_norm(x.typed_data(), scale.typed_data(), epsilon, static_cast<int64_t>(x.element_count()) / width, width,
           y->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

JAXSPEC_HANDLER(jaxspec_rms_norm, jaxspec::run_rms_norm,
                xla::ffi::Ffi::Bind()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Floats>()
                    .Ret<jaxspec::Floats>()
                    .Attr<float>("epsilon"));
