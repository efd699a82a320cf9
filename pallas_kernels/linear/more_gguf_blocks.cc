#include "product.h"

namespace jaxspec {

extern const FormatList kMoreGgufBlocks = {
    float_format<Q4_K>("q4_k"),
    float_format<Q5_K>("q5_k"),
    float_format<Q6_K>("q6_k"),
    float_format<MXFP4>("mxfp4"),
};

}  // namespace jaxspec
