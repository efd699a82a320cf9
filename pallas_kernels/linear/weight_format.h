// Products with a weight in any format, for code that is no template.
//
// The kernels of a format are compiled once for each instruction set, in small files, and reached through a table. A call
// multiplies rows by dozens of outputs, so that it costs nothing to go through a pointer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "../native/parallel.h"

namespace jaxspec {

constexpr int kGroup = 16;  // outputs of a packed group
constexpr int kUnit = 32;   // inputs that share a scale of the activations
constexpr int kBeyond = 128;  // floats after quantised rows that products may read; their values do not matter

// A weight `[outputs, inputs]`; packed groups of rows are as large as that many rows.
struct Matrix {
  const uint8_t* data;
  int64_t outputs, inputs, row_bytes;

  const uint8_t* row(int64_t i) const { return data + i * row_bytes; }
};

struct WeightFormat {
  std::string_view name;  // such as "q4_k", or "q4_k_int8" if packed
  int values, bytes;      // weights of a block, and its bytes
  int planes;             // bytes that an activation is stored in; 0: they are float32, and the weight is not packed
  float most;             // largest integer that an activation is rounded to
  // What quantised activations need to know: the code that means zero, parts of a unit with scales of their own, and
  // whether outputs have zero points.
  int zero, parts;
  bool zero_point;
  // y[r * y_stride + o] = row r times output `first + o`, for o below `count`, of one row or more. `x` is what `prepare`
  // gives, or `quantise` with `kBeyond` floats after it.
  void (*multiply)(const float* x, int64_t rows, const Matrix& w, int64_t first, int64_t count, float* y,
                   int64_t y_stride);
  // The weights of one output as float32.
  void (*unpack)(const Matrix& w, int64_t output, float* y);
  // Pack `outputs` rows of `blocks` blocks as a file has them; null where nothing is packed.
  void (*pack)(const uint8_t* rows, int64_t outputs, int64_t blocks, uint8_t* out);

  int64_t row_bytes(int64_t inputs) const { return inputs / values * bytes; }
  // Whether a buffer of that size holds the weight.
  bool fits(int64_t outputs, int64_t inputs, int64_t size) const {
    return inputs % values == 0 && size == outputs * row_bytes(inputs);
  }
  // Floats that a quantised row takes.
  int64_t quantised_size(int64_t inputs) const { return inputs / kUnit * (planes * kUnit / 4 + 2 + parts); }
  // Outputs that a thread takes at a time: enough work to be worth the hand-over, few enough that threads end together.
  int64_t unit_outputs(int64_t outputs, int64_t bytes_per_output, int64_t threads) const {
    constexpr int64_t kUnitBytes = 64 * 1024, kGrain = 24;
    const int64_t by_bytes = kUnitBytes / std::max<int64_t>(1, bytes_per_output), by_threads = outputs / (6 * threads);
    const int64_t unit = std::min(by_bytes, by_threads);
    if (planes) return std::max<int64_t>(1, unit / kGroup) * kGroup;
    return (std::max<int64_t>(1, unit) + kGrain - 1) / kGrain * kGrain;
  }
};

using FormatList = std::initializer_list<WeightFormat>;

// The format of that name, or null.
const WeightFormat* find_format(std::string_view name);

// Quantise part `part` of `parts` of the inputs of all rows, for products with a weight in a packed format.
void quantise(const WeightFormat& format, const float* x, int64_t rows, int64_t inputs, int64_t part, int64_t parts,
              float* out);

// y = silu(gate) * up.
void activate(const float* gate, const float* up, int64_t count, float* y);
// y = (up + 1) gate sigmoid(alpha gate), with the gate at most `limit` and up within it on both sides.
void activate_clamped(const float* gate, const float* up, int64_t count, float limit, float alpha, float* y);

// y += scale * x.
void add_scaled(const float* x, float scale, int64_t count, float* y);

// Rows as `multiply` takes them: themselves, or quantised. The result lives until this thread's next call.
const float* prepare(const WeightFormat& format, ThreadPool& pool, int64_t threads, const float* x, int64_t rows,
                     int64_t inputs);

// y[r * outputs + o] for all rows and outputs.
void linear(const WeightFormat& format, ThreadPool& pool, int64_t threads, const float* x, int64_t rows, const Matrix& w,
            float* y);

// SwiGLU of a weight whose first half of rows is the gate: y[r * columns + c] = silu(gate) * up.
void swiglu(const WeightFormat& format, ThreadPool& pool, int64_t threads, const float* x, int64_t rows, const Matrix& w,
            float* y);

}  // namespace jaxspec
