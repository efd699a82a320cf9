#include "packed_product.h"

namespace jaxspec {

extern const FormatList kPackedGguf8 = {
    packed_format<PackedQ8_0, 1>("q8_0_int8"),
    packed_format<PackedQ4_0, 1>("q4_0_int8"),
    packed_format<PackedQ4_1, 1>("q4_1_int8"),
    packed_format<PackedQ5_0, 1>("q5_0_int8"),
    packed_format<PackedMXFP4, 1>("mxfp4_int8"),
};

}  // namespace jaxspec
