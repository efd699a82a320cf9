// Rows times a weight, the weight read once and unpacked in registers.
//
// One (row, output) pair is one `Lanes` accumulator over the inputs in ascending order and one fixed sum over its lanes.
// Tiles share loads between pairs and nothing else, so the bits of a pair depend neither on the number of rows, nor on the
// tile it falls into, nor on threads; and a quantised weight gives the bits of the float32 weight that it stands for.
#pragma once

#include "../native/prefetch.h"
#include "formats.h"
#include "weight_format.h"

namespace jaxspec {

// Rows that one pass over the weight serves: as many accumulators as there are registers, two outputs each.
#if defined(__AVX512F__)
constexpr int kTileRows = 8;
#elif defined(__AVX2__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 4;
#endif

// Outputs per tile: as many as leave registers for the weights; more for few rows, where too few accumulators would wait
// for each other.
template <class Format, int kRows>
constexpr int tile_outputs() {
#if defined(__AVX512F__)
  return kRows <= 3 ? 4 : Format::kStep == kLanes ? 3 : 2;
#else
  return kRows == 1 ? 4 : 2;
#endif
}

// What a tile fetches while it multiplies: `distance` bytes behind each of its own weight rows (0: the rows of the next
// tile), `stride` bytes a step. Where several tiles of rows meet the same outputs, each fetches a part of the next ones.
struct Ahead {
  int64_t distance, stride;
};

namespace detail {

// y[r][o] = sum(acc[o][r]) for all pairs of a tile.
template <int kOutputs, int kRows>
inline void write_sums(const Lanes (&acc)[kOutputs][kRows], float* y, int64_t y_stride) {
#if defined(__AVX512F__)
  constexpr int kPairs = kOutputs * kRows;
  if constexpr (kPairs >= 6) {
#pragma GCC unroll 2
    for (int done = 0; done < kPairs; done += kLanes) {
      Lanes flat[kLanes];
      float out[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++)
        flat[i] = done + i < kPairs ? acc[(done + i) % kOutputs][(done + i) / kOutputs] : zero();
      store(out, sums(flat));
      for (int i = done; i < std::min(kPairs, done + kLanes); i++)
        y[i / kOutputs * y_stride + i % kOutputs] = out[i - done];
    }
    return;
  }
#endif
  for (int o = 0; o < kOutputs; o++)
    for (int r = 0; r < kRows; r++) y[r * y_stride + o] = sum(acc[o][r]);
}

template <class Format, int kOutputs, int kRows>
inline void multiply_tile(const float* x, const Matrix& w, int64_t first, Ahead ahead, float* y, int64_t y_stride) {
  constexpr int kParts = Format::kStep / kLanes;
  Lanes acc[kOutputs][kRows];
  for (int o = 0; o < kOutputs; o++)
    for (int r = 0; r < kRows; r++) acc[o][r] = zero();
  const uint8_t* rows[kOutputs];
  for (int o = 0; o < kOutputs; o++) rows[o] = w.row(first + o);
  const int64_t steps = w.inputs / Format::kStep;
  for (int64_t step = 0; step < steps; step++) {
    Lanes weight[kOutputs][kParts];
    for (int o = 0; o < kOutputs; o++) {
      Format::unpack(rows[o], step, weight[o]);
      prefetch(rows[o] + ahead.distance + step * ahead.stride);
    }
    for (int part = 0; part < kParts; part++) {
      for (int r = 0; r < kRows; r++) {
        Lanes input = load(x + r * w.inputs + step * Format::kStep + part * kLanes);
        hold(input);
        for (int o = 0; o < kOutputs; o++) acc[o][r] = fma(input, weight[o][part], acc[o][r]);
      }
    }
  }
  if constexpr (Format::kValues == 1) {
    if (int tail = static_cast<int>(w.inputs % kLanes)) {
      for (int o = 0; o < kOutputs; o++) {
        Lanes weight = Format::unpack_tail(rows[o], steps, tail);
        for (int r = 0; r < kRows; r++)
          acc[o][r] = fma(load(x + r * w.inputs + steps * kLanes, tail), weight, acc[o][r]);
      }
    }
  }
  write_sums(acc, y, y_stride);
}

template <class Format, int kRows>
void multiply_rows(const float* x, const Matrix& w, int64_t first, int64_t count, Ahead ahead, float* y,
                   int64_t y_stride) {
  constexpr int kOutputs = tile_outputs<Format, kRows>();
  if (ahead.distance == 0) ahead.distance = kOutputs * w.row_bytes;
  int64_t o = 0;
  for (; o + kOutputs <= count; o += kOutputs)
    multiply_tile<Format, kOutputs, kRows>(x, w, first + o, ahead, y + o, y_stride);
  // A weight ends with fewer outputs at most once: row by row will do.
  for (; o < count; o++)
    for (int r = 0; r < kRows; r++)
      multiply_tile<Format, 1, 1>(x + r * w.inputs, w, first + o, ahead, y + r * y_stride + o, y_stride);
}

template <class Format, int kRows = kTileRows>
void multiply_few(const float* x, int64_t rows, const Matrix& w, int64_t first, int64_t count, Ahead ahead, float* y,
                  int64_t y_stride) {
  if (rows == kRows) {
    multiply_rows<Format, kRows>(x, w, first, count, ahead, y, y_stride);
  } else if constexpr (kRows > 1) {
    multiply_few<Format, kRows - 1>(x, rows, w, first, count, ahead, y, y_stride);
  }
}

template <class Format>
void unpack_row(const uint8_t* row, int64_t inputs, float* out) {
  constexpr int kParts = Format::kStep / kLanes;
  const int64_t steps = inputs / Format::kStep;
  for (int64_t step = 0; step < steps; step++) {
    Lanes w[kParts];
    Format::unpack(row, step, w);
    for (int part = 0; part < kParts; part++) store(out + step * Format::kStep + part * kLanes, w[part]);
  }
  if constexpr (Format::kValues == 1) {
    if (int tail = static_cast<int>(inputs % kLanes))
      store(out + steps * kLanes, Format::unpack_tail(row, steps, tail), tail);
  }
}

}  // namespace detail

// y[r * y_stride + o] = row r of x times row `first + o` of the weight, for o below `count`.
template <class Format>
void multiply(const float* x, int64_t rows, const Matrix& w, int64_t first, int64_t count, float* y,
              int64_t y_stride) {
  // Weights of a few outputs stay in the second-level cache while tile after tile of the rows, which stays in the first,
  // meets them. Unpacking anew for every tile costs less than keeping what was unpacked.
  constexpr int64_t kTogether = 12;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t together = tiles == 1 ? count : kTogether;
  const int64_t stride = Format::kStep * Format::kBytes / Format::kValues / tiles;
  for (int64_t o = 0; o < count; o += together) {
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t r = tile * kTileRows;
      const int64_t distance = tiles == 1 ? 0 : together * w.row_bytes + tile * w.row_bytes / tiles;
      detail::multiply_few<Format>(x + r * w.inputs, std::min<int64_t>(kTileRows, rows - r), w, first + o,
                                   std::min(together, count - o), {distance, stride}, y + r * y_stride + o, y_stride);
    }
  }
}

// A row of a table of formats.
template <class Format>
constexpr WeightFormat float_format(std::string_view name) {
  return {name, Format::kValues, Format::kBytes, 0, 0, 0, 0, false, multiply<Format>,
          [](const Matrix& w, int64_t output, float* y) { detail::unpack_row<Format>(w.row(output), w.inputs, y); },
          nullptr};
}

}  // namespace jaxspec
