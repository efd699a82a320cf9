#include "product.h"

namespace jaxspec {

extern const FormatList kGgufBlocks = {
    float_format<Q8_0>("q8_0"),
    float_format<Q4_0>("q4_0"),
    float_format<Q4_1>("q4_1"),
    float_format<Q5_0>("q5_0"),
};

}  // namespace jaxspec
