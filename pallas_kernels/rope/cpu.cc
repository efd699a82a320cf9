#include <cmath>

#include "../native/handler.h"

namespace jaxspec {
namespace {

ffi::Error run_rope_tables(Ints position, Floats frequency, ffi::ResultBuffer<ffi::F32> cos,
                           ffi::ResultBuffer<ffi::F32> sin) {
  const int64_t rows = position.dimensions()[0], pairs = frequency.dimensions()[0];
  for (int64_t t = 0; t < rows; t++) {
    for (int64_t i = 0; i < pairs; i++) {
      const float angle = static_cast<float>(position.typed_data()[t]) * frequency.typed_data()[i];
      cos->typed_data()[t * pairs + i] = std::cos(angle);
      sin->typed_data()[t * pairs + i] = std::sin(angle);
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

JAXSPEC_HANDLER(jaxspec_rope_tables, jaxspec::run_rope_tables,
                xla::ffi::Ffi::Bind()
                    .Arg<jaxspec::Ints>()
                    .Arg<jaxspec::Floats>()
                    .Ret<jaxspec::Floats>()
                    .Ret<jaxspec::Floats>());
