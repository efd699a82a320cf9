#include "product.h"

namespace jaxspec {

extern const FormatList kNumbers = {
    float_format<Float32>("float32"),
    float_format<BFloat16>("bfloat16"),
    float_format<Float16>("float16"),
};

}  // namespace jaxspec
