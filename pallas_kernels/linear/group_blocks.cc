#include "product.h"

namespace jaxspec {

extern const FormatList kGroupBlocks = {
    float_format<Int4G32>("int4_g32"),
    float_format<Int4G64>("int4_g64"),
    float_format<Int4G128>("int4_g128"),
    float_format<Int8G32>("int8_g32"),
    float_format<Int8G64>("int8_g64"),
    float_format<Int8G128>("int8_g128"),
    float_format<FP8G32>("fp8_g32"),
    float_format<FP8G128>("fp8_g128"),
};

}  // namespace jaxspec
