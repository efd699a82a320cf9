#include "packed_product.h"

namespace jaxspec {

extern const FormatList kPackedGroups8 = {
    packed_format<PackedInt4G32, 1>("int4_g32_int8"),
    packed_format<PackedInt4G64, 1>("int4_g64_int8"),
    packed_format<PackedInt4G128, 1>("int4_g128_int8"),
    packed_format<PackedInt8G32, 1>("int8_g32_int8"),
    packed_format<PackedInt8G64, 1>("int8_g64_int8"),
    packed_format<PackedInt8G128, 1>("int8_g128_int8"),
};

}  // namespace jaxspec
