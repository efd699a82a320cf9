// How weights lie in memory, one type per format: plain numbers, the GGUF blocks (described in ggml's documentation of
// its formats) that `blocks.py` lists, and the groups that `groups.py` describes.
//
// `unpack(row, step, w)` gives weights `[step * kStep, (step + 1) * kStep)` of a row. Every weight is the float32 that
// dequantising gives: a scale of eleven bits times a small code is exact, so at most one rounding takes place, and the
// order of the arithmetic cannot matter. A zero point is taken off as an integer, before the one product that rounds.
#pragma once

#include "../native/small_floats.h"

namespace jaxspec {

// Plain numbers: float32, bfloat16, float16.
template <int kBytes_, Lanes (*kLoad)(const void*)>
struct Dense {
  static constexpr int kStep = kLanes, kValues = 1, kBytes = kBytes_;

  static int64_t offset(int64_t step) { return step * kStep * kBytes; }
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[1]) { w[0] = kLoad(row + offset(step)); }
  // The last `count` weights, fewer than a step; nothing behind them is read.
  static Lanes unpack_tail(const uint8_t* row, int64_t step, int count) {
    uint8_t padded[kLanes * kBytes] = {};
    std::memcpy(padded, row + offset(step), count * kBytes);
    return kLoad(padded);
  }
};

inline Lanes load_float(const void* p) { return load(static_cast<const float*>(p)); }

using Float32 = Dense<4, load_float>;
using BFloat16 = Dense<2, load_bfloat>;
using Float16 = Dense<2, load_half>;

// Blocks of 32 weights.
template <int kBytes_>
struct Block32 {
  static constexpr int kStep = 32, kValues = 32, kBytes = kBytes_;

  static int64_t offset(int64_t step) { return step * kBytes; }
};

// Blocks of 256 weights, unpacked in eight parts.
template <int kBytes_>
struct Block256 {
  static constexpr int kStep = 32, kValues = 256, kBytes = kBytes_;

  static int64_t offset(int64_t step) { return step / 8 * kBytes + step % 8 * (kBytes / 8); }
};

// Scale, 32 int8.
struct Q8_0 : Block32<34> {
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* block = row + offset(step);
    Lanes scale = set(read_half(block));
    w[0] = load_int8(block + 2) * scale;
    w[1] = load_int8(block + 18) * scale;
  }
};

// Scale, 32 codes of four bits: the low halves of 16 bytes, then the high ones. A code stands for `code - 8`.
struct Q4_0 : Block32<18> {
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* block = row + offset(step);
    float scale = read_half(block);
    Levels levels(scale, -8 * scale);
    Codes codes = load_codes(block + 2);
    w[0] = levels[codes];
    w[1] = levels[shift_right(codes, 4)];
  }
};

// Scale, minimum, 32 codes of four bits.
struct Q4_1 : Block32<20> {
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* block = row + offset(step);
    Levels levels(read_half(block), read_half(block + 2));
    Codes codes = load_codes(block + 4);
    w[0] = levels[codes];
    w[1] = levels[shift_right(codes, 4)];
  }
};

// Scale, 32 fifth bits, 32 codes of four bits. A code stands for `code - 16`.
struct Q5_0 : Block32<22> {
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* block = row + offset(step);
    float scale = read_half(block);
    uint32_t fifth;
    std::memcpy(&fifth, block + 2, sizeof fifth);
    Codes codes = load_codes(block + 6);
    w[0] = value(set_where(keep_bits(codes, 15), fifth & 0xFFFF, 16), scale);
    w[1] = value(set_where(shift_right(codes, 4), fifth >> 16, 16), scale);
  }

 private:
  static Lanes value(Codes codes, float scale) { return fma(to_float(codes), set(scale), set(-16 * scale)); }
};

// Scale of scales, scale of minima, 8 scales and 8 minima of six bits in 12 bytes. Of 256 codes of four or five bits, 32
// are a part: the low halves of 32 bytes are one part's lowest bits, the high ones the next one's. Fifth bits come before.
template <int kBytes_, bool kFifth>
struct KBlock : Block256<kBytes_> {
  using Block256<kBytes_>::kBytes;

  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* block = row + step / 8 * kBytes;
    int part = static_cast<int>(step % 8);
    const uint8_t* packed = block + 4;
    int scale, minimum;
    if (part < 4) {
      scale = packed[part] & 63;
      minimum = packed[part + 4] & 63;
    } else {
      scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6 << 4);
      minimum = (packed[part + 4] >> 4) | (packed[part] >> 6 << 4);
    }
    float each = read_half(block) * scale, offset = -(read_half(block + 2) * minimum);
    const uint8_t* low = block + (kFifth ? 48 : 16) + part / 2 * 32;
    int shift = part % 2 * 4;
    if constexpr (kFifth) {
      for (int i = 0; i < 2; i++) {
        Codes codes = keep_bits(shift_right(load_codes(low + 16 * i), shift), 15) |
                      shift_left(keep_bits(shift_right(load_codes(block + 16 + 16 * i), part), 1), 4);
        w[i] = fma(to_float(codes), set(each), set(offset));
      }
    } else {
      Levels levels(each, offset);
      w[0] = levels[shift_right(load_codes(low), shift)];
      w[1] = levels[shift_right(load_codes(low + 16), shift)];
    }
  }
};

using Q4_K = KBlock<144, false>;
using Q5_K = KBlock<176, true>;

// Low four bits and high two bits of 256 codes, 16 scales of int8, scale of scales. A code stands for `code - 32`.
struct Q6_K : Block256<210> {
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* block = row + step / 8 * kBytes;
    int half = static_cast<int>(step % 8) / 4, part = static_cast<int>(step % 4);
    const uint8_t* low = block + 64 * half + 32 * (part % 2);
    const uint8_t* high = block + 128 + 32 * half;
    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192) + 8 * half + 2 * part;
    float scale = read_half(block + 208);
    for (int i = 0; i < 2; i++) {
      Codes codes = keep_bits(shift_right(load_codes(low + 16 * i), part / 2 * 4), 15) |
                    shift_left(keep_bits(shift_right(load_codes(high + 16 * i), 2 * part), 3), 4);
      w[i] = (to_float(codes) - set(32)) * set(scale * scales[i]);
    }
  }
};

// Scale, 32 codes of four bits in the order of Q4_0: numbers of one sign bit, two of exponent and one of fraction.
struct MXFP4 : Block32<17> {
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* block = row + offset(step);
    const Lanes half = set(half_power(block[0]));
    w[0] = load_e2m1_doubled<0>(block + 1) * half;
    w[1] = load_e2m1_doubled<4>(block + 1) * half;
  }
};

// A group of `kValues`: head, codes. `kBits` is the size of a code.
template <int kBits, int kValues_, int kHead>
struct GroupBlock {
  static constexpr int kStep = 32, kValues = kValues_, kBytes = kHead + kBits * kValues / 8, kSteps = kValues / kStep;

  static int64_t offset(int64_t step) { return step / kSteps * kBytes + step % kSteps * (kBytes / kSteps); }
  static const uint8_t* block_of(const uint8_t* row, int64_t step) { return row + step / kSteps * kBytes; }
  static const uint8_t* codes_of(const uint8_t* row, int64_t step) {
    return block_of(row, step) + kHead + step % kSteps * (4 * kBits);
  }
};

inline float read_float(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <int kValues, int kHead = 5>
struct Int4Group : GroupBlock<4, kValues, kHead> {
  using Base = GroupBlock<4, kValues, kHead>;
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* head = Base::block_of(row, step);
    const float scale = kHead == 5 ? read_float(head) : short_scale(head[1] | head[2] << 8, head[0]);
    const int zero = kHead == 5 ? static_cast<int8_t>(head[4]) + 8 : head[0] & 15;
    const Steps steps(scale, static_cast<float>(zero));
    const Codes codes = load_codes(Base::codes_of(row, step));
    w[0] = steps[codes];
    w[1] = steps[shift_right(codes, 4)];
  }
};

template <int kValues>
struct Int8Group : GroupBlock<8, kValues, 5> {
  using Base = GroupBlock<8, kValues, 5>;
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* head = Base::block_of(row, step);
    const uint8_t* codes = Base::codes_of(row, step);
    const Lanes scale = set(read_float(head)), zero_point = set(static_cast<int8_t>(head[4]));
    w[0] = (load_int8(codes) - zero_point) * scale;
    w[1] = (load_int8(codes + 16) - zero_point) * scale;
  }
};

template <int kValues>
struct FP8Group : GroupBlock<8, kValues, 4> {
  using Base = GroupBlock<8, kValues, 4>;
  static void unpack(const uint8_t* row, int64_t step, Lanes (&w)[2]) {
    const uint8_t* codes = Base::codes_of(row, step);
    const Lanes scale = set(read_float(Base::block_of(row, step)));
    w[0] = load_e4m3(codes) * scale;
    w[1] = load_e4m3(codes + 16) * scale;
  }
};

using Int4G32 = Int4Group<32, 3>;
using Int4G64 = Int4Group<64>;
using Int4G128 = Int4Group<128>;
using Int8G32 = Int8Group<32>;
using Int8G64 = Int8Group<64>;
using Int8G128 = Int8Group<128>;
using FP8G32 = FP8Group<32>;
using FP8G128 = FP8Group<128>;

}  // namespace jaxspec
