// Weights repacked for integer products: the codes of sixteen outputs side by side.
//
// A group of sixteen outputs is stored block after block along the inputs. A block of a group is a list of fields, and in
// a field the elements of the outputs lie next to each other:
//
//   d          float16, one per output: the scale, or the scale of scales
//   m          float16, one per output: the minimum, or the scale of minima; only in formats with minima
//   scales     int8; minima uint8: only in blocks of 256, for each part of 16 or 32 inputs
//   low bits   four bytes per output and element: element e of a unit of 32 inputs holds inputs 8e to 8e + 3 in its low
//              halves and 8e + 4 to 8e + 7 in its high ones; whole bytes for codes of eight bits, inputs 4e to 4e + 3
//   high bits  the fifth bit, or the fifth and the sixth, of the codes of a unit
//
// Group formats (`groups.py`) have these fields instead of d, m, scales and minima:
//
//   scale      float32; of `int4_g32` its upper 16 bits
//   zero       int8, the zero point less the middle code; of `int4_g32` bits 12 to 15 of the scale, then the zero point
//
// MXFP4 has one, `scale` uint8, the power of two. Its codes stand for entries of a table (`kE2M1Codes`).
//
// So one load gives four inputs of sixteen outputs, which one instruction multiplies by four activations. The last group
// of a weight holds fewer outputs if sixteen do not divide them; its fields are as much shorter.
#pragma once

#include <algorithm>

#include "../native/bytes.h"
#include "../native/small_floats.h"
#include "weight_format.h"

namespace jaxspec {

static_assert(kGroup == kLanes, "an output is a lane");

// One block of a file, taken apart.
struct Parts {
  uint8_t codes[256];
  uint16_t d = 0, m = 0;  // float16
  int8_t scales[16];
  uint8_t minima[8];
  uint8_t head[5];  // scale and zero point of a group
};

namespace detail {

inline uint16_t read_16(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void read_nibbles(const uint8_t* p, int count, uint8_t* codes) {
  for (int i = 0; i < count; i++) {
    codes[i] = p[i] & 15;
    codes[count + i] = p[i] >> 4;
  }
}

inline void read_fifth_bits(const uint8_t* p, uint8_t* codes) {
  uint32_t fifth;
  std::memcpy(&fifth, p, sizeof fifth);
  for (int i = 0; i < 32; i++) codes[i] |= (fifth >> i & 1) << 4;
}

// Eight scales and eight minima of six bits in twelve bytes.
inline void read_k_scales(const uint8_t* p, Parts& parts) {
  for (int i = 0; i < 4; i++) {
    parts.scales[i] = p[i] & 63;
    parts.minima[i] = p[i + 4] & 63;
    parts.scales[i + 4] = (p[i + 8] & 15) | (p[i] >> 6 << 4);
    parts.minima[i + 4] = (p[i + 8] >> 4) | (p[i + 4] >> 6 << 4);
  }
}

}  // namespace detail

// `kBits` of a code, inputs of a block, parts of a unit with scales of their own, what code means zero, whether there are
// minima, and bytes of a block in a file.
template <int kBits_, int kValues_, int kParts_, int kZero_, bool kMinimum_, int kFileBytes_>
struct Layout {
  static constexpr int kBits = kBits_, kValues = kValues_, kParts = kParts_, kZero = kZero_;
  static constexpr bool kMinimum = kMinimum_, kSuper = kValues_ > kUnit, kZeroPoint = false, kTable = false;
  static constexpr int kFileBytes = kFileBytes_, kUnits = kValues / kUnit;
  // Elements per output and unit.
  static constexpr int kLow = kBits == 8 ? 8 : 4, kHigh = kBits == 5 ? 1 : kBits == 6 ? 2 : 0;
  // Bytes per output before each field, and of all.
  static constexpr int kScales = kMinimum ? 4 : 2, kMinima = kScales + (kSuper ? kUnits * kParts : 0);
  static constexpr int kLowBits = kMinima + (kSuper && kMinimum ? kUnits : 0);
  static constexpr int kHighBits = kLowBits + 4 * kLow * kUnits, kBytes = kHighBits + 4 * kHigh * kUnits;
};

// A group: one scale and one zero point. `kShort` says that both take three bytes.
template <int kBits_, int kValues_, bool kShort_ = false>
struct GroupLayout {
  static constexpr int kBits = kBits_, kValues = kValues_, kParts = 1, kZero = kBits == 4 ? 8 : 128;
  static constexpr bool kMinimum = false, kSuper = false, kZeroPoint = true, kShort = kShort_, kTable = false;
  static constexpr int kUnits = kValues / kUnit, kLow = kBits == 8 ? 8 : 4, kHigh = 0;
  // Bytes per output before each field, and of all.
  static constexpr int kZeros = kShort ? 2 : 4, kScales = kZeros + 1, kMinima = kScales, kLowBits = kScales;
  static constexpr int kHighBits = kLowBits + 4 * kLow * kUnits, kBytes = kHighBits, kFileBytes = kBytes;

  static void take_apart(const uint8_t* block, Parts& parts) {
    if (kShort) {  // the file's word begins with its low byte
      parts.head[0] = block[1], parts.head[1] = block[2], parts.head[2] = block[0];
    } else {
      std::memcpy(parts.head, block, kLowBits);
    }
    for (int unit = 0; unit < kUnits; unit++) {
      const uint8_t* from = block + kLowBits + unit * 4 * kLow;
      if (kBits == 4) {
        detail::read_nibbles(from, 16, parts.codes + kUnit * unit);
      } else {
        for (int i = 0; i < kUnit; i++) parts.codes[kUnit * unit + i] = from[i] ^ 128;
      }
    }
  }

  // Scale and zero point (less the middle code) of an output; `head` is its byte of a field of a group of `n`.
  static float scale(const uint8_t* group, int64_t n, int64_t output) {
    if (!kShort) {
      float whole;
      std::memcpy(&whole, group + 4 * output, sizeof whole);
      return whole;
    }
    return short_scale(detail::read_16(group + 2 * output), group[n * kZeros + output]);
  }
  static int zero(const uint8_t* group, int64_t n, int64_t output) {
    const uint8_t byte = group[n * kZeros + output];
    return kShort ? (byte & 15) - 8 : static_cast<int8_t>(byte);
  }
};

using PackedInt4G32 = GroupLayout<4, 32, true>;
using PackedInt4G64 = GroupLayout<4, 64>;
using PackedInt4G128 = GroupLayout<4, 128>;
using PackedInt8G32 = GroupLayout<8, 32>;
using PackedInt8G64 = GroupLayout<8, 64>;
using PackedInt8G128 = GroupLayout<8, 128>;

struct PackedQ8_0 : Layout<8, 32, 1, 128, false, 34> {
  static void take_apart(const uint8_t* block, Parts& parts) {
    parts.d = detail::read_16(block);
    for (int i = 0; i < 32; i++) parts.codes[i] = block[2 + i] ^ 128;
  }
};

struct PackedQ4_0 : Layout<4, 32, 1, 8, false, 18> {
  static void take_apart(const uint8_t* block, Parts& parts) {
    parts.d = detail::read_16(block);
    detail::read_nibbles(block + 2, 16, parts.codes);
  }
};

struct PackedQ4_1 : Layout<4, 32, 1, 0, true, 20> {
  static void take_apart(const uint8_t* block, Parts& parts) {
    parts.d = detail::read_16(block);
    parts.m = detail::read_16(block + 2);
    detail::read_nibbles(block + 4, 16, parts.codes);
  }
};

struct PackedQ5_0 : Layout<5, 32, 1, 16, false, 22> {
  static void take_apart(const uint8_t* block, Parts& parts) {
    parts.d = detail::read_16(block);
    detail::read_nibbles(block + 6, 16, parts.codes);
    detail::read_fifth_bits(block + 2, parts.codes);
  }
};

struct PackedQ4_K : Layout<4, 256, 1, 0, true, 144> {
  static void take_apart(const uint8_t* block, Parts& parts) {
    parts.d = detail::read_16(block);
    parts.m = detail::read_16(block + 2);
    detail::read_k_scales(block + 4, parts);
    for (int i = 0; i < 4; i++) detail::read_nibbles(block + 16 + 32 * i, 32, parts.codes + 64 * i);
  }
};

struct PackedQ5_K : Layout<5, 256, 1, 0, true, 176> {
  static void take_apart(const uint8_t* block, Parts& parts) {
    parts.d = detail::read_16(block);
    parts.m = detail::read_16(block + 2);
    detail::read_k_scales(block + 4, parts);
    for (int i = 0; i < 4; i++) detail::read_nibbles(block + 48 + 32 * i, 32, parts.codes + 64 * i);
    for (int unit = 0; unit < 8; unit++)
      for (int i = 0; i < 32; i++) parts.codes[32 * unit + i] |= (block[16 + i] >> unit & 1) << 4;
  }
};

struct PackedQ6_K : Layout<6, 256, 2, 32, false, 210> {
  static void take_apart(const uint8_t* block, Parts& parts) {
    parts.d = detail::read_16(block + 208);
    std::memcpy(parts.scales, block + 192, 16);
    for (int half = 0; half < 2; half++) {
      const uint8_t* low = block + 64 * half;
      const uint8_t* high = block + 128 + 32 * half;
      for (int part = 0; part < 4; part++)
        for (int i = 0; i < 32; i++)
          parts.codes[128 * half + 32 * part + i] =
              (low[32 * (part % 2) + i] >> part / 2 * 4 & 15) | (high[i] >> 2 * part & 3) << 4;
    }
  }
};

// The scale is a byte: half of a power of two.
struct PackedMXFP4 : Layout<4, 32, 1, 12, false, 17> {
  static constexpr bool kTable = true;
  static constexpr int kScales = 1, kMinima = 1, kLowBits = 1, kHighBits = 17, kBytes = 17;

  static void take_apart(const uint8_t* block, Parts& parts) {
    parts.head[0] = block[0];
    detail::read_nibbles(block + 1, 16, parts.codes);
  }
};

// Write a block of one output of a group of `n` outputs; the group's block begins at `out`.
template <class Format>
void pack_block(const Parts& parts, int64_t n, int64_t output, uint8_t* out) {
  const auto field = [&](int before, int bytes, int element) { return out + n * before + (element * n + output) * bytes; };
  if constexpr (Format::kZeroPoint) {
    std::memcpy(field(0, Format::kZeros, 0), parts.head, Format::kZeros);
    *field(Format::kZeros, 1, 0) = parts.head[Format::kZeros];
  } else if constexpr (Format::kTable) {
    *field(0, 1, 0) = parts.head[0];
  } else {
    std::memcpy(field(0, 2, 0), &parts.d, 2);
  }
  if (Format::kMinimum) std::memcpy(field(2, 2, 0), &parts.m, 2);
  if (Format::kSuper) {
    for (int i = 0; i < Format::kUnits * Format::kParts; i++)
      *field(Format::kScales, 1, i) = static_cast<uint8_t>(parts.scales[i]);
    for (int i = 0; Format::kMinimum && i < Format::kUnits; i++) *field(Format::kMinima, 1, i) = parts.minima[i];
  }
  for (int unit = 0; unit < Format::kUnits; unit++) {
    const uint8_t* codes = parts.codes + kUnit * unit;
    for (int e = 0; e < Format::kLow; e++) {
      uint8_t* to = field(Format::kLowBits, 4, unit * Format::kLow + e);
      for (int i = 0; i < 4; i++)
        to[i] = Format::kBits == 8 ? codes[4 * e + i]
                                   : static_cast<uint8_t>((codes[8 * e + i] & 15) | codes[8 * e + 4 + i] << 4);
    }
    constexpr int kQuads = Format::kHigh ? 8 / Format::kHigh : 0, kWidth = Format::kHigh;
    for (int e = 0; e < Format::kHigh; e++) {
      uint8_t* to = field(Format::kHighBits, 4, unit * Format::kHigh + e);
      for (int i = 0; i < 4; i++) {
        int bits = 0;
        for (int quad = 0; quad < kQuads; quad++) bits |= (codes[4 * (kQuads * e + quad) + i] >> 4) << kWidth * quad;
        to[i] = static_cast<uint8_t>(bits);
      }
    }
  }
}

// Pack `outputs` rows of `blocks` blocks each, as a file has them.
template <class Format>
void pack_rows(const uint8_t* rows, int64_t outputs, int64_t blocks, uint8_t* out) {
  Parts parts;
  for (int64_t first = 0; first < outputs; first += kGroup) {
    const int64_t n = std::min<int64_t>(kGroup, outputs - first);
    for (int64_t output = 0; output < n; output++) {
      const uint8_t* row = rows + (first + output) * blocks * Format::kFileBytes;
      for (int64_t block = 0; block < blocks; block++) {
        Format::take_apart(row + block * Format::kFileBytes, parts);
        pack_block<Format>(parts, n, output, out + (first * blocks + block * n) * Format::kBytes);
      }
    }
  }
}

// Copy the blocks of a group of `n` outputs as if there were sixteen; the added ones are zeros.
template <class Format>
void widen_group(const uint8_t* group, int64_t n, int64_t blocks, uint8_t* out) {
  std::memset(out, 0, kGroup * blocks * Format::kBytes);
  for (int64_t block = 0; block < blocks; block++) {
    const uint8_t* from = group + block * n * Format::kBytes;
    uint8_t* to = out + block * kGroup * Format::kBytes;
    const auto widen = [&](int before, int bytes, int elements) {
      for (int e = 0; e < elements; e++)
        std::memcpy(to + kGroup * (before + e * bytes), from + n * (before + e * bytes), n * bytes);
    };
    if constexpr (Format::kZeroPoint) {
      widen(0, Format::kZeros, 1);
      widen(Format::kZeros, 1, 1);
    } else if constexpr (Format::kTable) {
      widen(0, 1, 1);
    } else {
      widen(0, 2, Format::kMinimum ? 2 : 1);
    }
    widen(Format::kScales, 1, Format::kLowBits - Format::kScales);
    widen(Format::kLowBits, 4, (Format::kBytes - Format::kLowBits) / 4);
  }
}

// The numbers of one output of a group of `n`, as dequantising the file's blocks gives them.
template <class Format>
void unpack_output(const uint8_t* group, int64_t n, int64_t output, int64_t blocks, float* out) {
  for (int64_t block = 0; block < blocks; block++) {
    const uint8_t* p = group + block * n * Format::kBytes;
    const auto field = [&](int before, int bytes, int element) { return p + n * before + (element * n + output) * bytes; };
    float d, m = 0.0f;
    int zero = Format::kZero;
    if constexpr (Format::kZeroPoint) {
      d = Format::scale(p, n, output);
      zero += Format::zero(p, n, output);
    } else if constexpr (Format::kTable) {
      d = half_power(*field(0, 1, 0));
    } else {
      d = read_half(field(0, 2, 0));
      if (Format::kMinimum) m = read_half(field(2, 2, 0));
    }
    for (int i = 0; i < Format::kValues; i++) {
      const int unit = i / kUnit, at = i % kUnit, quad = at / 4;
      int code;
      if (Format::kBits == 8) {
        code = field(Format::kLowBits, 4, unit * 8 + quad)[i % 4];
      } else {
        code = field(Format::kLowBits, 4, unit * 4 + quad / 2)[i % 4] >> quad % 2 * 4 & 15;
      }
      if constexpr (Format::kHigh > 0) {
        constexpr int kQuads = 8 / Format::kHigh;
        const int bits = field(Format::kHighBits, 4, unit * Format::kHigh + quad / kQuads)[i % 4];
        code |= (bits >> Format::kHigh * (quad % kQuads) & ((1 << Format::kHigh) - 1)) << 4;
      }
      if (Format::kTable) code = kE2M1Codes[code];
      float scale = d, minimum = m;
      if (Format::kSuper) {
        scale *= static_cast<int8_t>(*field(Format::kScales, 1, i * Format::kParts / kUnit));
        if (Format::kMinimum) minimum = -(m * *field(Format::kMinima, 1, unit));
      }
      const float number = scale * static_cast<float>(code - zero);
      out[block * Format::kValues + i] = Format::kMinimum ? number + minimum : number;
    }
  }
}

}  // namespace jaxspec
