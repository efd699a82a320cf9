#include "packed_product.h"

namespace jaxspec {

extern const FormatList kPackedGguf16 = {
    packed_format<PackedQ8_0, 2>("q8_0_int16"),
    packed_format<PackedQ4_0, 2>("q4_0_int16"),
    packed_format<PackedQ4_1, 2>("q4_1_int16"),
    packed_format<PackedQ5_0, 2>("q5_0_int16"),
    packed_format<PackedMXFP4, 2>("mxfp4_int16"),
};

}  // namespace jaxspec
