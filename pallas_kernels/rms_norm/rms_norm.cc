#include "rms_norm.h"

#include "../native/lanes.h"

namespace jaxspec {

void rms_norm(const float* x, const float* scale, float epsilon, int64_t rows, int64_t width, float* y) {
  const int64_t whole = width / kLanes * kLanes;
  const int tail = static_cast<int>(width - whole);
  for (int64_t r = 0; r < rows; r++, x += width, y += width) {
    Lanes squares = zero();
    for (int64_t i = 0; i < whole; i += kLanes) {
      Lanes a = load(x + i);
      squares = fma(a, a, squares);
    }
    if (tail) {
      Lanes a = load(x + whole, tail);
      squares = fma(a, a, squares);
    }
    Lanes factor = set(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + epsilon));
    for (int64_t i = 0; i < whole; i += kLanes) store(y + i, load(x + i) * factor * load(scale + i));
    if (tail) store(y + whole, load(x + whole, tail) * factor * load(scale + whole, tail), tail);
  }
}

void add_parts(const float* x, const float* parts, int64_t num_parts, int64_t stride, int64_t count, float* total) {
  if (num_parts == 1) {
    for (int64_t i = 0; i < count; i++) total[i] = x[i] + parts[i];
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    float sum = 0.0f;
    for (int64_t p = 0; p < num_parts; p++) sum += parts[p * stride + i];
    total[i] = x[i] + sum;
  }
}

}  // namespace jaxspec
