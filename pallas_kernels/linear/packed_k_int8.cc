#include "packed_product.h"

namespace jaxspec {

extern const FormatList kPackedK8 = {
    packed_format<PackedQ4_K, 1>("q4_k_int8"),
    packed_format<PackedQ5_K, 1>("q5_k_int8"),
    packed_format<PackedQ6_K, 1>("q6_k_int8"),
};

}  // namespace jaxspec
