#include "packed_product.h"

namespace jaxspec {

extern const FormatList kPackedGroups16 = {
    packed_format<PackedInt4G32, 2>("int4_g32_int16"),
    packed_format<PackedInt4G64, 2>("int4_g64_int16"),
    packed_format<PackedInt4G128, 2>("int4_g128_int16"),
    packed_format<PackedInt8G32, 2>("int8_g32_int16"),
    packed_format<PackedInt8G64, 2>("int8_g64_int16"),
    packed_format<PackedInt8G128, 2>("int8_g128_int16"),
};

}  // namespace jaxspec
