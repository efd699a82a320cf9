// Rows of activations of eight or sixteen bits times a packed weight.
//
// A row is quantised by itself: 32 consecutive inputs share the scale `max|x| / 127`, or `max|x| / (127 * 256)` for sixteen
// bits, and each is rounded to the nearest integer, ties to even. Sixteen bits are two planes of eight: code = 256 * high +
// low. Their sums are shifted and added as integers. One (row, output) pair is one float accumulator: for every 32 inputs in ascending order the exact
// integer sum of codes times codes is multiplied by the weight's scale and added, times the activations' scale, by one
// fused product. No other row takes part, so the bits of a pair depend neither on the number of rows nor on threads.
#pragma once

#include "../native/parallel.h"
#include "../native/prefetch.h"
#include "packed_formats.h"

namespace jaxspec {

// Rows that share one pass over a group: two accumulators each must fit into the registers.
#if defined(__AVX512F__)
constexpr int kPackedRows = 8;
#elif defined(__AVX2__)
constexpr int kPackedRows = 2;
#else
constexpr int kPackedRows = 1;
#endif

namespace detail {

struct WideGroupTag;

// A tile of `rows` quantised rows. For each unit of 32 inputs and each row in turn: 32 codes of each plane, the higher one
// first; the scale; the sum of the numbers that the codes stand for; and for each part of a unit what is added to an
// integer sum, which takes the weights' code that means zero into account.
struct Quantised {
  int8_t* codes;
  float *scale, *sum;
  int32_t* start;

  Quantised(float* base, int64_t rows, int64_t units, int planes)
      : codes(reinterpret_cast<int8_t*>(base)),
        scale(base + rows * units * (planes * kUnit / 4)),
        sum(scale + rows * units),
        start(reinterpret_cast<int32_t*>(sum + rows * units)) {}
};

// Largest magnitude of a unit, as the bits of a float: a NaN is above everything else.
inline uint32_t largest_bits(const float* x) {
  uint32_t largest = 0;
  for (int i = 0; i < kUnit; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7FFFFFFFu);
  }
  return largest;
}

// Quantise unit `unit` of row `row` of a tile of `rows`.
template <int kPlanes>
void quantise_unit(const WeightFormat& format, const float* x, int64_t unit, int64_t row, int64_t rows,
                   const Quantised& out) {
  const int64_t at = unit * rows + row;
  int8_t* codes = out.codes + at * kPlanes * kUnit;
  const uint32_t bits = largest_bits(x);
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  int32_t sums[2] = {0, 0};
  // Below, the reciprocal of a scale would be infinite; such numbers count as zeros.
  constexpr float kTiny = 1e-36f;
  if (bits >= 0x7F800000u || largest < kTiny) {
    std::memset(codes, 0, kPlanes * kUnit);
    out.scale[at] = bits >= 0x7F800000u ? std::nanf("") : 0.0f;
  } else {
    constexpr float kMost = kPlanes == 1 ? 127.0f : 127.0f * 256;
    const float reciprocal = kMost / largest;
    out.scale[at] = largest / kMost;
    for (int half = 0; half < 2; half++) {
      const Lanes exact = load(x + kLanes * half) * set(reciprocal);
      if constexpr (kPlanes == 1) {
        sums[half] = store_rounded(codes + kLanes * half, exact);
      } else {
        sums[half] = store_planes(codes + kLanes * half, codes + kUnit + kLanes * half, exact);
      }
    }
  }
  // Zero points are taken off before the activations' scale is multiplied, minima after it.
  out.sum[at] = (format.zero_point ? 1.0f : out.scale[at]) * static_cast<float>(sums[0] + sums[1]);
  if (format.parts == 1) {
    out.start[at] = -format.zero * (sums[0] + sums[1]);
  } else {
    out.start[2 * at] = -format.zero * sums[0];
    out.start[2 * at + 1] = -format.zero * sums[1];
  }
}

// The codes of quad `quad` (four inputs) of a unit of sixteen outputs; `low` and `high` are the unit's fields.
template <class Format>
[[gnu::always_inline]] inline Bytes codes_of(const uint8_t* low, const uint8_t* high, int quad) {
  if constexpr (Format::kBits == 8) {
    return load_bytes(low + 64 * quad);
  } else {
    const Bytes both = load_bytes(low + 64 * (quad / 2));
    const Bytes four = keep(quad % 2 ? shift_right(both, 4) : both, 15);
    if constexpr (Format::kTable) {
      return look_up(kE2M1Codes, four);
    } else if constexpr (Format::kHigh == 0) {
      return four;
    } else {
      constexpr int kQuads = 8 / Format::kHigh, kMask = Format::kHigh == 1 ? 16 : 48;
      const Bytes bits = load_bytes(high + 64 * (quad / kQuads));
      const int from = Format::kHigh * (quad % kQuads);
      return four | keep(from > 4 ? shift_right(bits, from - 4) : shift_left(bits, 4 - from), kMask);
    }
  }
}

// Scales of the outputs of a block, or their scales of scales.
template <class Format>
[[gnu::always_inline]] inline Lanes load_scale(const uint8_t* group) {
  if constexpr (Format::kTable) {
    return load_half_powers(group);
  } else if constexpr (!Format::kZeroPoint) {
    return load_half(group);
  } else if constexpr (Format::kShort) {
    return load_short_scales(group, group + kGroup * Format::kZeros);
  } else {
    return load(reinterpret_cast<const float*>(group));
  }
}

// Zero points of the outputs of a block, less the middle code.
template <class Format>
[[gnu::always_inline]] inline Lanes load_zero_point(const uint8_t* group) {
  if constexpr (!Format::kZeroPoint) {
    return zero();
  } else if constexpr (Format::kShort) {
    return to_float(keep_bits(load_codes(group + kGroup * Format::kZeros), 15)) - set(8);
  } else {
    return load_int8(group + kGroup * Format::kZeros);
  }
}

// y[r * y_stride + o] for `kRows` rows and the first `count` outputs of a group. Meanwhile
// `step` bytes from `ahead` on are fetched for each unit, into the second-level cache.
template <class Format, int kPlanes, int kRows>
void multiply_group(const Quantised& x, const uint8_t* group, int64_t blocks, const uint8_t* ahead, int64_t step,
                    float* y, int64_t y_stride, int64_t skip, int64_t count) {
  constexpr int kBlock = kGroup * Format::kBytes, kUnits = Format::kUnits, kParts = Format::kParts;
  Lanes total[kRows];
  for (int r = 0; r < kRows; r++) total[r] = zero();
  const int8_t* codes = x.codes;
  const float *scale = x.scale, *sum = x.sum;
  const int32_t* start = x.start;
  for (int64_t block = 0; block < blocks; block++, group += kBlock) {
    const Lanes d = load_scale<Format>(group), zero_point = load_zero_point<Format>(group);
    for (int unit = 0; unit < kUnits; unit++) {
      for (int64_t line = 0; line < step; line += 64) prefetch(ahead + line);
      ahead += step;
      const uint8_t* low = group + kGroup * Format::kLowBits + unit * 64 * Format::kLow;
      const uint8_t* high = group + kGroup * Format::kHighBits + unit * 64 * Format::kHigh;
      Lanes products[kRows];
#pragma GCC unroll 8
      for (int part = 0; part < kParts; part++) {
        constexpr int kQuads = 8 / kParts;
        // One row alone would wait for each of its sums: it gets two.
        constexpr int kChains = kRows == 1 ? 2 : 1;
        Int32s sums[kRows][kChains];
        for (int r = 0; r < kRows; r++) {
          sums[r][0] = set_ints(Format::kZero && kPlanes == 1 ? start[r * kParts + part] : 0);
          if (kChains > 1) sums[r][kChains - 1] = set_ints(0);
        }
#pragma GCC unroll 8
        for (int plane = 0; plane < kPlanes; plane++) {
          if (plane == 1) {
            for (int r = 0; r < kRows; r++) {
              for (int chain = 0; chain < kChains; chain++) sums[r][chain] = times_256(sums[r][chain]);
              if (Format::kZero) sums[r][0] = sums[r][0] + set_ints(start[r * kParts + part]);
            }
          }
#pragma GCC unroll 8
          for (int quad = part * kQuads; quad < (part + 1) * kQuads; quad++) {
            const Bytes weights = codes_of<Format>(low, high, quad);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++)
              sums[r][quad % kChains] = dot<Format::kBits>(sums[r][quad % kChains], weights,
                                                           load_four(codes + (r * kPlanes + plane) * kUnit + 4 * quad));
          }
        }
        Lanes weight_scale = d;
        if constexpr (Format::kSuper)
          weight_scale = d * load_int8(group + kGroup * (Format::kScales + unit * kParts + part));
        for (int r = 0; r < kRows; r++) {
          Lanes exact = to_float(kChains > 1 ? sums[r][0] + sums[r][kChains - 1] : sums[r][0]);
          if constexpr (Format::kZeroPoint) exact = fma(zero_point, set(-sum[r]), exact);
          products[r] = part == 0 ? exact * weight_scale : fma(exact, weight_scale, products[r]);
        }
      }
      for (int r = 0; r < kRows; r++) total[r] = fma(products[r], set(scale[r]), total[r]);
      if constexpr (Format::kMinimum) {
        Lanes minimum = load_half(group + 2 * kGroup);
        if constexpr (Format::kSuper)
          minimum = zero() - minimum * to_float(load_codes(group + kGroup * (Format::kMinima + unit)));
        for (int r = 0; r < kRows; r++) total[r] = fma(minimum, set(sum[r]), total[r]);
      }
      codes += kRows * kPlanes * kUnit;
      scale += kRows;
      sum += kRows;
      start += kRows * kParts;
    }
  }
  for (int r = 0; r < kRows; r++) {
    if (count == kGroup) {
      store(y + r * y_stride, total[r]);
    } else {
      float whole[kGroup];
      store(whole, total[r]);
      std::copy(whole + skip, whole + skip + count, y + r * y_stride);
    }
  }
}

template <class Format, int kPlanes, int kRows = kPackedRows>
void multiply_group_rows(int64_t rows, const Quantised& x, const uint8_t* group, int64_t blocks, const uint8_t* ahead,
                         int64_t step, float* y, int64_t y_stride, int64_t skip, int64_t count) {
  if (rows == kRows) {
    multiply_group<Format, kPlanes, kRows>(x, group, blocks, ahead, step, y, y_stride, skip, count);
  } else if constexpr (kRows > 1) {
    multiply_group_rows<Format, kPlanes, kRows - 1>(rows, x, group, blocks, ahead, step, y, y_stride, skip, count);
  }
}

}  // namespace detail

// y[r * y_stride + o] = row r times output `first + o`, for o below `count`. Rows lie in tiles: as many full ones as there
// are, then the rest.
template <class Format, int kPlanes>
void multiply_packed(const float* x, int64_t rows, const Matrix& w, int64_t first, int64_t count, float* y,
                     int64_t y_stride) {
  const int64_t blocks = w.inputs / Format::kValues, units = w.inputs / kUnit;
  const int64_t num_tiles = (rows + kPackedRows - 1) / kPackedRows, group_bytes = kGroup * blocks * Format::kBytes;
  const int64_t row_size = units * (kPlanes * kUnit / 4 + 2 + Format::kParts);
  for (int64_t at = first; at < first + count;) {
    const int64_t start = at / kGroup * kGroup, lanes = std::min<int64_t>(kGroup, w.outputs - start);
    const int64_t end = std::min(start + lanes, first + count);
    const uint8_t* group = w.data + start * blocks * Format::kBytes;
    if (lanes < kGroup) {
      auto* wide = reinterpret_cast<uint8_t*>(scratch<detail::WideGroupTag>((group_bytes + 3) / 4));
      widen_group<Format>(group, lanes, blocks, wide);
      group = wide;
    }
    // One tile fetches what it comes to next; each of several fetches its part of the next group.
    constexpr int64_t kDistance = 4096;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
      const int64_t r = tile * kPackedRows, some = std::min<int64_t>(kPackedRows, rows - r);
      const detail::Quantised quantised(const_cast<float*>(x) + r * row_size, some, units, kPlanes);
      const uint8_t* ahead = group + (num_tiles == 1 ? kDistance : group_bytes + tile * group_bytes / num_tiles);
      detail::multiply_group_rows<Format, kPlanes>(
          some, quantised, group, blocks, ahead, kGroup * Format::kBytes / Format::kUnits / num_tiles,
          y + r * y_stride + (at - first), y_stride, at - start, end - at);
    }
    at = end;
  }
}

// The weights of one output of a packed weight as float32.
template <class Format>
void unpack_packed(const Matrix& w, int64_t output, float* y) {
  const int64_t start = output / kGroup * kGroup, lanes = std::min<int64_t>(kGroup, w.outputs - start);
  const int64_t blocks = w.inputs / Format::kValues;
  unpack_output<Format>(w.data + start * blocks * Format::kBytes, lanes, output - start, blocks, y);
}

// A row of a table of formats.
template <class Format, int kPlanes>
constexpr WeightFormat packed_format(std::string_view name) {
  return {name, Format::kValues, Format::kBytes, kPlanes, Format::kZero, Format::kParts, Format::kZeroPoint,
          multiply_packed<Format, kPlanes>, unpack_packed<Format>, pack_rows<Format>};
}

}  // namespace jaxspec
