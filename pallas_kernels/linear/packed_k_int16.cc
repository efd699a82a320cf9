#include "packed_product.h"

namespace jaxspec {

extern const FormatList kPackedK16 = {
    packed_format<PackedQ4_K, 2>("q4_k_int16"),
    packed_format<PackedQ5_K, 2>("q5_k_int16"),
    packed_format<PackedQ6_K, 2>("q6_k_int16"),
};

}  // namespace jaxspec
