// Products of small integers: 64 unsigned bytes, four for each of sixteen outputs, times four signed bytes.
//
// The sums are exact in every instruction set, so the bits of a result depend on none of them.
#pragma once

#include "lanes.h"

namespace jaxspec {

// Four signed bytes, the activations of four consecutive inputs.
inline int32_t load_four(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return four;
}

// Where no instruction adds four products of bytes to 32 bits, pairs of products are added in 16 bits, as many as fit.
// Activations of sixteen bits, and those for codes of eight bits, are integers of 16 bits then, of each four the first,
// third, second and fourth one. Elsewhere activations of sixteen bits are two planes of bytes.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

#if defined(__AVX512F__)

struct Bytes {
  __m512i v;
};
struct Int32s {
  __m512i v;
};

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes keep(Bytes a, int bits) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(bits)))}; }
// Bits cross from byte to byte: `keep` follows.
inline Bytes shift_right(Bytes a, int n) { return {_mm512_srli_epi16(a.v, n)}; }
inline Bytes shift_left(Bytes a, int n) { return {_mm512_slli_epi16(a.v, n)}; }
inline Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
// The entry of a table of sixteen for each byte, which is below sixteen.
inline Bytes look_up(const uint8_t* table, Bytes a) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), a.v)};
}
inline Int32s set_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Int32s operator+(Int32s a, Int32s b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Lanes to_float(Int32s a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline void round_to(int32_t (&rounded)[kLanes], Lanes a) { _mm512_storeu_si512(rounded, _mm512_cvtps_epi32(a.v)); }
inline Int32s shift_left(Int32s a, int n) { return {_mm512_slli_epi32(a.v, n)}; }

#if defined(__AVX512VNNI__)
template <int kBits>
inline Int32s dot(Int32s sum, Bytes codes, int32_t inputs) {
  return {_mm512_dpbusd_epi32(sum.v, codes.v, _mm512_set1_epi32(inputs))};
}
#else
// Two products, added, in each sixteen bits.
inline Bytes multiply_pairs(Bytes codes, int32_t inputs) {
  return {_mm512_maddubs_epi16(codes.v, _mm512_set1_epi32(inputs))};
}
inline Bytes add_pairs(Bytes a, Bytes b) { return {_mm512_add_epi16(a.v, b.v)}; }
// Two numbers of sixteen bits times two inputs of sixteen bits.
inline Int32s dot_wide(Int32s sum, Bytes pairs, int32_t inputs) {
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs.v, _mm512_set1_epi32(inputs)))};
}
// The bytes of even and of odd inputs as numbers of sixteen bits, and the lowest four bits of even ones.
inline Bytes even_bytes(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi16(255))}; }
inline Bytes odd_bytes(Bytes a) { return {_mm512_srli_epi16(a.v, 8)}; }
inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi16(15))}; }
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Bytes {
  __m256i v[2];
};
struct Int32s {
  __m256i v[2];
};

inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes load_bytes(const uint8_t* p) { return {load_32(p), load_32(p + 32)}; }
inline Bytes keep(Bytes a, int bits) {
  __m256i mask = _mm256_set1_epi8(static_cast<char>(bits));
  return {_mm256_and_si256(a.v[0], mask), _mm256_and_si256(a.v[1], mask)};
}
inline Bytes shift_right(Bytes a, int n) { return {_mm256_srli_epi16(a.v[0], n), _mm256_srli_epi16(a.v[1], n)}; }
inline Bytes shift_left(Bytes a, int n) { return {_mm256_slli_epi16(a.v[0], n), _mm256_slli_epi16(a.v[1], n)}; }
inline Bytes operator|(Bytes a, Bytes b) {
  return {_mm256_or_si256(a.v[0], b.v[0]), _mm256_or_si256(a.v[1], b.v[1])};
}
inline Bytes look_up(const uint8_t* table, Bytes a) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(both, a.v[0]), _mm256_shuffle_epi8(both, a.v[1])};
}
inline Int32s set_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Int32s operator+(Int32s a, Int32s b) {
  return {_mm256_add_epi32(a.v[0], b.v[0]), _mm256_add_epi32(a.v[1], b.v[1])};
}
inline Lanes to_float(Int32s a) { return {_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}; }
inline void round_to(int32_t (&rounded)[kLanes], Lanes a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded), _mm256_cvtps_epi32(a.v[0]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + 8), _mm256_cvtps_epi32(a.v[1]));
}
inline Int32s shift_left(Int32s a, int n) { return {_mm256_slli_epi32(a.v[0], n), _mm256_slli_epi32(a.v[1], n)}; }
#if defined(__AVXVNNI__)
template <int kBits>
inline Int32s dot(Int32s sum, Bytes codes, int32_t inputs) {
  const __m256i x = _mm256_set1_epi32(inputs);
  return {_mm256_dpbusd_avx_epi32(sum.v[0], codes.v[0], x), _mm256_dpbusd_avx_epi32(sum.v[1], codes.v[1], x)};
}
#else
inline Bytes multiply_pairs(Bytes codes, int32_t inputs) {
  const __m256i x = _mm256_set1_epi32(inputs);
  return {_mm256_maddubs_epi16(codes.v[0], x), _mm256_maddubs_epi16(codes.v[1], x)};
}
inline Bytes add_pairs(Bytes a, Bytes b) {
  return {_mm256_add_epi16(a.v[0], b.v[0]), _mm256_add_epi16(a.v[1], b.v[1])};
}
inline Int32s dot_wide(Int32s sum, Bytes pairs, int32_t inputs) {
  const __m256i x = _mm256_set1_epi32(inputs);
  return {_mm256_add_epi32(sum.v[0], _mm256_madd_epi16(pairs.v[0], x)),
          _mm256_add_epi32(sum.v[1], _mm256_madd_epi16(pairs.v[1], x))};
}
inline Bytes even_bytes(Bytes a) {
  const __m256i low = _mm256_set1_epi16(255);
  return {_mm256_and_si256(a.v[0], low), _mm256_and_si256(a.v[1], low)};
}
inline Bytes low_nibbles(Bytes a) {
  const __m256i low = _mm256_set1_epi16(15);
  return {_mm256_and_si256(a.v[0], low), _mm256_and_si256(a.v[1], low)};
}
inline Bytes odd_bytes(Bytes a) { return {_mm256_srli_epi16(a.v[0], 8), _mm256_srli_epi16(a.v[1], 8)}; }
#endif

#else

// The four bytes of an output are an integer, the first one lowest.
struct Bytes {
  FourInts v[4];
};
struct Int32s {
  FourInts v[4];
};

template <class T, class F>
inline T each_four(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline Bytes load_bytes(const uint8_t* p) {
  Bytes a;
  std::memcpy(a.v, p, sizeof a.v);
  return a;
}
inline Bytes keep(Bytes a, int bits) {
  return each_four<Bytes>([&](int i) { return a.v[i] & static_cast<int32_t>(bits * 0x01010101u); });
}
inline Bytes shift_right(Bytes a, int n) { return each_four<Bytes>([&](int i) { return a.v[i] >> n; }); }
inline Bytes shift_left(Bytes a, int n) { return each_four<Bytes>([&](int i) { return a.v[i] << n; }); }
inline Bytes operator|(Bytes a, Bytes b) { return each_four<Bytes>([&](int i) { return a.v[i] | b.v[i]; }); }
inline Bytes look_up(const uint8_t* table, Bytes a) {
  uint8_t bytes[4 * kLanes];
  std::memcpy(bytes, a.v, sizeof bytes);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load_bytes(bytes);
}
inline Int32s set_ints(int32_t x) { return each_four<Int32s>([=](int) { return FourInts{x, x, x, x}; }); }
inline Int32s operator+(Int32s a, Int32s b) { return each_four<Int32s>([&](int i) { return a.v[i] + b.v[i]; }); }
inline Lanes to_float(Int32s a) { return each([&](int i) { return __builtin_convertvector(a.v[i], Four); }); }
inline Int32s shift_left(Int32s a, int n) { return each_four<Int32s>([&](int i) { return a.v[i] << n; }); }
// The nearest integers, ties to even, of numbers below 2^22.
inline void round_to(int32_t (&rounded)[kLanes], Lanes a) {
  float numbers[kLanes];
  store(numbers, round(a));
  for (int i = 0; i < kLanes; i++) rounded[i] = static_cast<int32_t>(numbers[i]);
}
template <int kBits>
inline Int32s dot(Int32s sum, Bytes codes, int32_t inputs) {
  const FourInts all = {inputs, inputs, inputs, inputs};
#if defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t x = bits_as<int8x16_t>(all);
  return each_four<Int32s>([&](int i) {
    const int32x4_t before = bits_as<int32x4_t>(sum.v[i]);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return bits_as<FourInts>(vusdotq_s32(before, bits_as<uint8x16_t>(codes.v[i]), x));
#else
    const int8x16_t c = bits_as<int8x16_t>(codes.v[i]);
    if constexpr (kBits < 8) return bits_as<FourInts>(vdotq_s32(before, c, x));
    // Both factors are signed: codes less 128, and twice 64.
    const int8x16_t half = vdupq_n_s8(64);
    const int32x4_t centred = vdotq_s32(before, veorq_s8(c, vdupq_n_s8(-128)), x);
    return bits_as<FourInts>(vdotq_s32(vdotq_s32(centred, half, x), half, x));
#endif
  });
#elif defined(__SSE2__)
  // Sixteen bits hold a byte of either kind; one instruction multiplies and adds two of them.
  const __m128i x = bits_as<__m128i>(all);
  const __m128i even = _mm_srai_epi16(_mm_slli_epi16(x, 8), 8), odd = _mm_srai_epi16(x, 8);
  return each_four<Int32s>([&](int i) {
    const __m128i c = bits_as<__m128i>(codes.v[i]), low = _mm_and_si128(c, _mm_set1_epi16(255));
    const __m128i products =
        _mm_add_epi32(_mm_madd_epi16(low, even), _mm_madd_epi16(_mm_srli_epi16(c, 8), odd));
    return sum.v[i] + bits_as<FourInts>(products);
  });
#else
  return each_four<Int32s>([&](int i) {
    const FourInts c = codes.v[i];
    return sum.v[i] + (c & 255) * (all << 24 >> 24) + (c >> 8 & 255) * (all << 16 >> 24) +
           (c >> 16 & 255) * (all << 8 >> 24) + (c >> 24 & 255) * (all >> 24);
  });
#endif
}

#endif

// A level has the products above or those below.
template <int kBits>
Int32s dot(Int32s sum, Bytes codes, int32_t inputs);
Bytes multiply_pairs(Bytes codes, int32_t inputs);
Bytes add_pairs(Bytes a, Bytes b);
Int32s dot_wide(Int32s sum, Bytes pairs, int32_t inputs);
Bytes even_bytes(Bytes a);
Bytes odd_bytes(Bytes a);
Bytes low_nibbles(Bytes a);

// Keep a sum in its registers. GCC would reorder the sums of several products, and run out of registers.
template <class T>
[[gnu::always_inline]] inline T held(T a) {
#if defined(__AVX512F__)
  asm("" : "+v"(a.v));
#elif defined(__AVX2__)
  asm("" : "+x"(a.v[0]), "+x"(a.v[1]));
#endif
  return a;
}

// Vectors that compilers cut into the registers there are; loops over so few integers would stay loops.
using SixteenInts = int32_t __attribute__((vector_size(64)));
using EightInts = int32_t __attribute__((vector_size(32)));
using EightShorts = int16_t __attribute__((vector_size(16)));
using SixteenBytes = int8_t __attribute__((vector_size(16)));

template <class Narrow, class Ints>
inline void store_narrow(int8_t* p, const Ints& x) {
  const Narrow narrow = __builtin_convertvector(x, Narrow);
  std::memcpy(p, &narrow, sizeof narrow);
}

// The sum of sixteen numbers, halved at a time: compilers would take out each.
inline int32_t add_up(const SixteenInts& x) {
  EightInts eight[2];
  std::memcpy(eight, &x, sizeof eight);
  eight[0] += eight[1];
  FourInts four[2];
  std::memcpy(four, eight, sizeof four);
  four[0] += four[1];
  return (four[0][0] + four[0][1]) + (four[0][2] + four[0][3]);
}

// Write sixteen numbers below 128 in magnitude as the nearest integers, ties to even; returns their sum.
inline int32_t store_rounded(int8_t* p, Lanes a) {
  int32_t rounded[kLanes];
  round_to(rounded, a);
  SixteenInts x;
  std::memcpy(&x, rounded, sizeof x);
  store_narrow<SixteenBytes>(p, x);
  return add_up(x);
}

// Likewise numbers below 2^15: number `at` and the next ones of a row of `count`, as `kPairs` says. Two planes of bytes
// are 256 times the first one plus the second one.
inline int32_t store_rounded_16(int8_t* row, int at, int count, Lanes a) {
  int32_t rounded[kLanes];
  round_to(rounded, a);
  SixteenInts x;
  std::memcpy(&x, rounded, sizeof x);
  if constexpr (kPairs) {
    for (int half = 0; half < kLanes; half += 8) {  // compilers take vectors of sixteen apart, where eight fit
      EightInts eight;
      std::memcpy(&eight, rounded + half, sizeof eight);
#if defined(__clang__)
      eight = __builtin_shufflevector(eight, eight, 0, 2, 1, 3, 4, 6, 5, 7);
#else
      eight = __builtin_shuffle(eight, EightInts{0, 2, 1, 3, 4, 6, 5, 7});
#endif
      store_narrow<EightShorts>(row + 2 * (at + half), eight);
    }
  } else {
    const SixteenInts upper = (x + 128) >> 8;
    store_narrow<SixteenBytes>(row + at, upper);
    store_narrow<SixteenBytes>(row + count + at, x - upper * 256);
  }
  return add_up(x);
}

}  // namespace jaxspec
