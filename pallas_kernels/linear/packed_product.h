// Rows of activations of eight or sixteen bits times a packed weight.
//
// A row is quantised by itself: 32 consecutive inputs share the scale `max|x| / 127`, or `max|x| / (127 * 256)` for
// sixteen bits, and each is rounded to the nearest integer, ties to even. One (row, output) pair is one float accumulator:
// for every 32 inputs in ascending order the exact integer sum of codes times codes is multiplied by the weight's scale
// and added, times the activations' scale, by one fused product. No other row takes part, so the bits of a pair depend
// neither on the number of rows nor on threads.
#pragma once

#include "../native/parallel.h"
#include "../native/prefetch.h"
#include "packed_formats.h"

namespace jaxspec {

// Rows of a tile, which share one pass over a group. Up to `kDirect` rows meet a unit's codes as they are unpacked. For
// more rows these are unpacked once (but see `kUnpacksAgain`), and `kChunk` rows at a time, as many as registers have
// room for, read them again.
constexpr int kChunk = 4;
#if defined(__AVX512F__)
constexpr int kPackedRows = 8, kDirect = 8;
#elif defined(__AVX2__)
constexpr int kPackedRows = 16, kDirect = 4;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kPackedRows = 4, kDirect = 4;
#else
constexpr int kPackedRows = 1, kDirect = 1;
#endif
#if defined(__AMX_INT8__)
constexpr bool kAmx = true;
#else
constexpr bool kAmx = false;
#endif

// How far ahead of its use a weight is fetched that meets one tile of rows, in bytes.
constexpr int64_t kDistance = 4096;

// Whether AMX multiplies so many rows: fewer are faster without. Its formats scale whole units.
constexpr bool fills_tiles(int64_t rows, int parts) { return kAmx && parts == 1 && rows > 12; }
// Most rows of a tile of `rows` quantised rows in all.
constexpr int64_t tile_rows(int64_t rows, int planes, int parts) {
  return fills_tiles(rows, parts) ? 16 / planes : kPackedRows;
}
// A lambda whose indices are constants must not become a call.
#define JAXSPEC_INLINE __attribute__((always_inline))

namespace detail {

struct WideGroupTag;
// A tile of `rows` quantised rows. For each unit of 32 inputs and each row in turn: 32 codes of one byte, or of two as
// `store_rounded_16` writes them; the scale; the sum of the numbers that the codes stand for; and for each part of a
// unit what is added to an integer sum, which takes the weights' code that means zero into account.
struct Quantised {
  int8_t* codes;
  float *scale, *sum;
  int32_t* start;

  Quantised(float* base, int64_t rows, int64_t units, int planes)
      : codes(reinterpret_cast<int8_t*>(base)),
        scale(base + rows * units * (planes * kUnit / 4)),
        sum(scale + rows * units),
        start(reinterpret_cast<int32_t*>(sum + rows * units)) {}

  // Go to a later row of a unit; after a tile's last row comes the first one of the next unit.
  template <int kPlanes, int kParts>
  void skip(int64_t rows) {
    codes += rows * kPlanes * kUnit;
    scale += rows;
    sum += rows;
    start += rows * kParts;
  }
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
    const float reciprocal = format.most / largest;
    out.scale[at] = largest / format.most;
    for (int half = 0; half < 2; half++) {
      const Lanes exact = load(x + kLanes * half) * set(reciprocal);
      if constexpr (kPlanes == 1) {
        sums[half] = store_rounded(codes + kLanes * half, exact);
      } else {
        sums[half] = store_rounded_16(codes, kLanes * half, kUnit, exact);
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

// sums[r] = start(r) + `kQuads` quads of codes below 2^kBits, which `codes` gives, times the bytes at x + r * stride; of
// two planes the first one counts 256 times.
template <int kBits, int kQuads, int kPlanes, int kRows, class Codes, class Start>
[[gnu::always_inline]] inline void add_products(Int32s (&sums)[kRows], const Codes& codes, const Start& start,
                                                const int8_t* x, int stride) {
  if constexpr (kPairs) {
    static_assert(kBits < 8 && kPlanes == 1, "sums of two products fit into sixteen bits");
    // Sixteen bits hold so many sums of two products, each up to 2 * 127 * (2^kBits - 1).
    constexpr int kTogether = std::min(kQuads, kBits == 4 ? 8 : kBits == 5 ? 4 : 2);
    for (int r = 0; r < kRows; r++) sums[r] = start(r);
#pragma GCC unroll 8
    for (int first = 0; first < kQuads; first += kTogether) {
      Bytes pairs[kRows];
#pragma GCC unroll 8
      for (int quad = first; quad < first + kTogether; quad++) {
        const Bytes weights = held(codes(quad));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
          const Bytes two = multiply_pairs(weights, load_four(x + r * stride + 4 * quad));
          pairs[r] = held(quad == first ? two : add_pairs(pairs[r], two));
        }
      }
      for (int r = 0; r < kRows; r++) sums[r] = dot_wide(sums[r], pairs[r], 0x00010001);
    }
  } else {
    // AVX-512 has registers for both planes: codes are unpacked once, and fewer products wait for each other.
    constexpr bool kBoth = kPlanes == 2 && kPackedRows == 8;
    Int32s low[kRows];
    const auto add_plane = [&](const int8_t* inputs) JAXSPEC_INLINE {
      // One row alone would wait for each of its sums: it gets two.
      Int32s other = set_ints(0);
#pragma GCC unroll 8
      for (int quad = 0; quad < kQuads; quad++) {
        const Bytes weights = held(codes(quad));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
          const int8_t* four = inputs + r * stride + 4 * quad;
          Int32s& sum = kRows == 1 && quad % 2 ? other : sums[r];
          sum = dot<kBits>(sum, weights, load_four(four));
          if constexpr (kBoth) low[r] = dot<kBits>(low[r], weights, load_four(four + kUnit));
        }
      }
      if (kRows == 1) sums[0] = sums[0] + other;
    };
    for (int r = 0; r < kRows; r++) sums[r] = kPlanes == 1 ? start(r) : set_ints(0);
    for (int r = 0; kBoth && r < kRows; r++) low[r] = start(r);
    add_plane(x);
    if constexpr (kPlanes == 2) {
      for (int r = 0; r < kRows; r++) sums[r] = shift_left(sums[r], 8) + (kBoth ? low[r] : start(r));
      if constexpr (!kBoth) add_plane(x + kUnit);
    }
  }
}

// What the products of a unit are scaled by, and what is added to them.
template <class Format>
struct UnitScales {
  Lanes scale[Format::kParts], zero_point, minimum;

  UnitScales() = default;
  UnitScales(const uint8_t* group, Lanes d, Lanes zero_point_, int unit) : zero_point(zero_point_), minimum(zero()) {
    for (int part = 0; part < Format::kParts; part++) {
      scale[part] = d;
      if constexpr (Format::kSuper)
        scale[part] = d * load_int8(group + kGroup * (Format::kScales + unit * Format::kParts + part));
    }
    if constexpr (Format::kMinimum) {
      minimum = load_half(group + 2 * kGroup);
      if constexpr (Format::kSuper)
        minimum = zero() - minimum * to_float(load_codes(group + kGroup * (Format::kMinima + unit)));
    }
  }
};

// total[r] += a unit of a group times row r of `x`.
template <class Format, int kPlanes, int kRows, class Codes>
[[gnu::always_inline]] inline void multiply_unit(const Codes& codes, const UnitScales<Format>& w, const Quantised& x,
                                                 Lanes* total) {
  constexpr int kParts = Format::kParts, kQuads = 8 / kParts, kStride = kPlanes * kUnit;
  constexpr int kBits = Format::kTable ? 5 : Format::kBits;
  Lanes products[kRows];
#pragma GCC unroll 2
  for (int part = 0; part < kParts; part++) {
    const auto start = [&](int r) JAXSPEC_INLINE { return set_ints(Format::kZero ? x.start[r * kParts + part] : 0); };
    Int32s sums[kRows];
    if constexpr (kPlanes == 2 && kPairs) {
      for (int r = 0; r < kRows; r++) sums[r] = start(r);
#pragma GCC unroll 16
      for (int i = 2 * part * kQuads; i < 2 * (part + 1) * kQuads; i++) {
        const Bytes weights = held(codes(i));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++)
          sums[r] = held(dot_wide(sums[r], weights, load_four(x.codes + r * kStride + 4 * i)));
      }
    } else {
      const auto from_part = [&](int i) JAXSPEC_INLINE { return codes(part * kQuads + i); };
      add_products<kBits, kQuads, kPlanes>(sums, from_part, start, x.codes + 4 * kQuads * part, kStride);
    }
    for (int r = 0; r < kRows; r++) {
      Lanes exact = to_float(sums[r]);
      if constexpr (Format::kZeroPoint) exact = fma(w.zero_point, set(-x.sum[r]), exact);
      products[r] = part == 0 ? exact * w.scale[0] : fma(exact, w.scale[part], products[r]);
    }
  }
  for (int r = 0; r < kRows; r++) total[r] = fma(products[r], set(x.scale[r]), total[r]);
  if constexpr (Format::kMinimum)
    for (int r = 0; r < kRows; r++) total[r] = fma(w.minimum, set(x.sum[r]), total[r]);
}

// `multiply_unit` for `rows` rows, `kRows` at a time as long as there are so many.
template <class Format, int kPlanes, int kRows, class Codes>
[[gnu::always_inline]] inline void multiply_unit_rows(int64_t rows, const Codes& codes, const UnitScales<Format>& w,
                                                      Quantised x, Lanes* total) {
  for (; rows >= kRows; rows -= kRows, total += kRows) {
    multiply_unit<Format, kPlanes, kRows>(codes, w, x, total);
    x.skip<kPlanes, Format::kParts>(kRows);
  }
  if constexpr (kRows > 1) multiply_unit_rows<Format, kPlanes, kRows - 1>(rows, codes, w, x, total);
}

// Write `count` outputs of a group, from `skip` on.
[[gnu::always_inline]] inline void store_outputs(Lanes total, int64_t skip, int64_t count, float* y) {
  if (count == kGroup) return store(y, total);
  float whole[kGroup];
  store(whole, total);
  std::copy(whole + skip, whole + skip + count, y);
}

// y[r * y_stride + o] for `rows` rows and the first `count` outputs of a group. `kRows` is `rows`, or `kPackedRows` for
// all numbers above `kDirect`. Meanwhile `step` bytes from `ahead` on are fetched for each unit, into the second-level
// cache, and those 2 KB before them into the first one: half of the way, where one tile of rows meets the weight.
template <class Format, int kPlanes, int kRows>
void multiply_group(int64_t rows, Quantised x, const uint8_t* group, int64_t blocks, const uint8_t* ahead, int64_t step,
                    float* y, int64_t y_stride, int64_t skip, int64_t count) {
  constexpr bool kWide = kPairs && kPlanes == 2;
  // Codes that are as quickly unpacked as loaded.
  constexpr bool kUnpacksAgain = kWide && Format::kBits == 8 && kRows > kDirect;
  Lanes total[kRows];
  for (Lanes& one : total) one = zero();
  for (int64_t block = 0; block < blocks; block++, group += kGroup * Format::kBytes) {
    const Lanes d = load_scale<Format>(group), zero_point = load_zero_point<Format>(group);
    for (int unit = 0; unit < Format::kUnits; unit++) {
      for (int64_t line = 0; line < step; line += 64) {
        prefetch(ahead + line);
        prefetch_soon(ahead + line - kDistance / 2);
      }
      ahead += step;
      const uint8_t* low = group + kGroup * Format::kLowBits + unit * 64 * Format::kLow;
      const uint8_t* high = group + kGroup * Format::kHighBits + unit * 64 * Format::kHigh;
      UnitScales<Format> scales(group, d, zero_point, unit);
      // AVX2 (whose tiles have sixteen rows) has sixteen registers: with the scales there, codes would not fit.
      if constexpr (kRows == kDirect && kPackedRows == 16) asm volatile("" : "+m"(scales));
      // A quad of codes, or for `dot_wide` the even or odd ones of a quad.
      const auto unpack = [&](int i) JAXSPEC_INLINE {
        // Compilers would unpack for all rows at once, and keep the codes in memory.
        if constexpr (kUnpacksAgain) asm volatile("" : "+r"(low));
        if constexpr (kWide && Format::kBits == 4 && !Format::kTable)
          return low_nibbles(shift_right(load_bytes(low + 64 * (i / 4)), i / 2 % 2 * 4 + i % 2 * 8));
        const Bytes quad = codes_of<Format>(low, high, kWide ? i / 2 : i);
        if constexpr (kWide) return i % 2 ? odd_bytes(quad) : even_bytes(quad);
        return quad;
      };
      if constexpr (kRows <= kDirect) {
        multiply_unit<Format, kPlanes, kRows>(unpack, scales, x, total);
        x.skip<kPlanes, Format::kParts>(kRows);
      } else {
        Bytes codes[kWide ? 16 : 8];
#pragma GCC unroll 16
        for (int i = 0; !kUnpacksAgain && i < (kWide ? 16 : 8); i++) codes[i] = unpack(i);
        const auto unpacked = [&](int i) JAXSPEC_INLINE { return kUnpacksAgain ? unpack(i) : codes[i]; };
        multiply_unit_rows<Format, kPlanes, kChunk>(rows, unpacked, scales, x, total);
        x.skip<kPlanes, Format::kParts>(rows);
      }
    }
  }
  for (int r = 0; r < (kRows <= kDirect ? kRows : rows); r++) store_outputs(total[r], skip, count, y + r * y_stride);
}

template <class Format, int kPlanes, int kRows = kDirect>
void multiply_group_rows(int64_t rows, const Quantised& x, const uint8_t* group, int64_t blocks, const uint8_t* ahead,
                         int64_t step, float* y, int64_t y_stride, int64_t skip, int64_t count) {
  if (rows >= kRows) {
    constexpr int kMost = kRows == kDirect ? kPackedRows : kRows;
    (rows == kRows ? multiply_group<Format, kPlanes, kRows> : multiply_group<Format, kPlanes, kMost>)(
        rows, x, group, blocks, ahead, step, y, y_stride, skip, count);
  } else if constexpr (kRows > 1) {
    multiply_group_rows<Format, kPlanes, kRows - 1>(rows, x, group, blocks, ahead, step, y, y_stride, skip, count);
  }
}

}  // namespace detail
}  // namespace jaxspec

#if defined(__AMX_INT8__)
#include "packed_tiles.h"
#endif

namespace jaxspec {

// The group of sixteen outputs that begins with output `start`, widened if the weight ends within it.
template <class Format>
const uint8_t* whole_group(const Matrix& w, int64_t start) {
  const int64_t blocks = w.inputs / Format::kValues, lanes = std::min<int64_t>(kGroup, w.outputs - start);
  const uint8_t* group = w.data + start * blocks * Format::kBytes;
  if (lanes == kGroup) return group;
  auto* wide = reinterpret_cast<uint8_t*>(scratch<detail::WideGroupTag>((kGroup * blocks * Format::kBytes + 3) / 4));
  widen_group<Format>(group, lanes, blocks, wide);
  return wide;
}

// y[r * y_stride + o] = row r times output `first + o`, for o below `count`. Rows lie in tiles: as many full ones as
// there are, then the rest.
template <class Format, int kPlanes>
void multiply_packed(const float* x, int64_t rows, const Matrix& w, int64_t first, int64_t count, float* y,
                     int64_t y_stride) {
  const int64_t blocks = w.inputs / Format::kValues, units = w.inputs / kUnit;
  const int64_t group_bytes = kGroup * blocks * Format::kBytes;
  const int64_t row_size = units * (kPlanes * kUnit / 4 + 2 + Format::kParts);
  const int64_t most = tile_rows(rows, kPlanes, Format::kParts), num_tiles = (rows + most - 1) / most;
#if defined(__AMX_INT8__)
  const bool tiles = fills_tiles(rows, Format::kParts);
  if (tiles) detail::configure_tiles();
#endif
  for (int64_t at = first; at < first + count;) {
    const int64_t start = at / kGroup * kGroup, end = std::min({start + kGroup, w.outputs, first + count});
    const uint8_t* group = whole_group<Format>(w, start);
    // One tile fetches what it comes to next; each of several fetches its part of the next group.
    const int64_t step = kGroup * Format::kBytes / Format::kUnits / num_tiles;
#if defined(__AMX_INT8__)
    if constexpr (Format::kParts == 1) {
      if (tiles) {
        detail::multiply_group_tiles<Format, kPlanes>(
            rows, x, row_size, units, group, group + (num_tiles == 1 ? kDistance : group_bytes), step, y + (at - first),
            y_stride, at - start, end - at);
        at = end;
        continue;
      }
    }
#endif
    for (int64_t tile = 0; tile < num_tiles; tile++) {
      const int64_t r = tile * kPackedRows, some = std::min<int64_t>(kPackedRows, rows - r);
      const detail::Quantised quantised(const_cast<float*>(x) + r * row_size, some, units, kPlanes);
      const uint8_t* ahead = group + (num_tiles == 1 ? kDistance : group_bytes + tile * group_bytes / num_tiles);
      detail::multiply_group_rows<Format, kPlanes>(some, quantised, group, blocks, ahead, step,
                                                   y + r * y_stride + (at - first), y_stride, at - start, end - at);
    }
    at = end;
  }
#if defined(__AMX_INT8__)
  if (tiles) _tile_release();
#endif
}

// The weights of one output of a packed weight as float32.
template <class Format>
void unpack_packed(const Matrix& w, int64_t output, float* y) {
  const int64_t start = output / kGroup * kGroup, lanes = std::min<int64_t>(kGroup, w.outputs - start);
  const int64_t blocks = w.inputs / Format::kValues;
  unpack_output<Format>(w.data + start * blocks * Format::kBytes, lanes, output - start, blocks, y);
}

// A row of a table of formats, for activations that are rounded to so many bytes.
template <class Format, int kPrecision>
constexpr WeightFormat packed_format(std::string_view name) {
  // Sums of two products with codes of eight bits do not fit into sixteen.
  constexpr int kPlanes = kPairs && Format::kBits == 8 ? 2 : kPrecision;
  constexpr float kMost = kPrecision == 1 ? 127.0f : 127.0f * 256;
  return {name, Format::kValues, Format::kBytes, kPlanes, kMost, Format::kZero, Format::kParts, Format::kZeroPoint,
          multiply_packed<Format, kPlanes>, unpack_packed<Format>, pack_rows<Format>};
}

}  // namespace jaxspec
