// RMS normalisation, one row after another.
#pragma once

#include <cstdint>

namespace jaxspec {

// y = x / sqrt(mean(x^2) + epsilon) * scale, for rows of `width` numbers.
void rms_norm(const float* x, const float* scale, float epsilon, int64_t rows, int64_t width, float* y);

// total = x + the sum of `num_parts` parts, which lie `stride` numbers apart.
void add_parts(const float* x, const float* parts, int64_t num_parts, int64_t stride, int64_t count, float* total);

}  // namespace jaxspec
