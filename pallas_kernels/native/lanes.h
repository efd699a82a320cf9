// Sixteen float lanes, for AVX-512, AVX2 and anything else.
//
// Every sum over an input dimension in these kernels is sixteen partial sums, one per lane, which `sum` adds in one
// fixed order: a result does not depend on which rows are computed beside it, and AVX2 and AVX-512 agree in every bit.
// So do the portable lanes on Arm. On x86, whose baseline has no fused product, they add in the same order, but round
// differently.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxspec {

constexpr int kLanes = 16;
using FourInts = int32_t __attribute__((vector_size(16)));

#if defined(__AVX512F__)

struct Lanes {
  __m512 v;
};
struct Codes {  // sixteen small integers
  __m512i v;
};

inline Lanes zero() { return {_mm512_setzero_ps()}; }
inline Lanes set(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes iota() {
  return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load(const float* p, int n) { return {_mm512_maskz_loadu_ps((1u << n) - 1, p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, Lanes a, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1, a.v); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
// NaN in `b` comes out, here and in `min`.
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes round(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Lanes scale_by_power(Lanes a, Lanes n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Lanes from `n` on become `other`.
inline Lanes keep_first(Lanes a, int n, Lanes other) {
  return {_mm512_mask_mov_ps(other.v, n >= kLanes ? 0xFFFF : (1u << n) - 1, a.v)};
}
inline Lanes load_half(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
inline Lanes load_bfloat(const void* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Lanes load_int8(const void* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))))};
}
inline Codes load_codes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Codes shift_right(Codes a, int n) { return {_mm512_srli_epi32(a.v, n)}; }
inline Codes shift_left(Codes a, int n) { return {_mm512_slli_epi32(a.v, n)}; }
inline Codes keep_bits(Codes a, int mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(mask))}; }
inline Codes operator|(Codes a, Codes b) { return {_mm512_or_si512(a.v, b.v)}; }
// Lane l gets `value` or-ed in where bit l of `lanes` is set.
inline Codes set_where(Codes a, uint32_t lanes, int value) {
  return {_mm512_mask_or_epi32(a.v, static_cast<__mmask16>(lanes), a.v, _mm512_set1_epi32(value))};
}
inline Lanes to_float(Codes a) { return {_mm512_cvtepi32_ps(a.v)}; }

// What four-bit codes stand for: `code * scale + offset`. Bits of a code above the fourth are ignored.
struct Levels {
  Lanes table;
  Levels(float scale, float offset) : table(fma(iota(), set(scale), set(offset))) {}
  Lanes operator[](Codes c) const { return {_mm512_permutexvar_ps(c.v, table.v)}; }
};

inline float sum(Lanes a) {
  __m256 low = _mm512_castps512_ps256(a.v);
  __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  __m256 eight = _mm256_add_ps(low, high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

namespace detail {
template <int kLow, int kHigh>
inline __m512 fold_quarters(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, kLow), _mm512_shuffle_f32x4(a, b, kHigh));
}
template <int kLow, int kHigh>
inline __m512 fold_within(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, kLow), _mm512_shuffle_ps(a, b, kHigh));
}
}  // namespace detail

// Lane i of the result is `sum(a[i])`, the same additions in the same order; a transposition costs a third of 16 sums.
// Inlined always: sixteen accumulators should not go through memory.
[[gnu::always_inline]] inline Lanes sums(const Lanes (&a)[kLanes]) {
  __m512 eights[8], fours[4], twos[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) eights[i] = detail::fold_quarters<0x44, 0xEE>(a[2 * i].v, a[2 * i + 1].v);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) fours[i] = detail::fold_quarters<0x88, 0xDD>(eights[2 * i], eights[2 * i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) twos[i] = detail::fold_within<0x44, 0xEE>(fours[2 * i], fours[2 * i + 1]);
  __m512 ones = detail::fold_within<0x88, 0xDD>(twos[0], twos[1]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {_mm512_permutexvar_ps(order, ones)};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Lanes {
  __m256 v[2];
};
struct Codes {
  __m256i v[2];
};

inline __m256i lane_mask(int n) {  // n may be negative or more than 8
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes load(const float* p, int n) {
  Lanes a = {_mm256_maskload_ps(p, lane_mask(n)), _mm256_setzero_ps()};
  if (n > 8) a.v[1] = _mm256_maskload_ps(p + 8, lane_mask(n - 8));
  return a;
}
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.v[0]);
  _mm256_storeu_ps(p + 8, a.v[1]);
}
inline void store(float* p, Lanes a, int n) {
  _mm256_maskstore_ps(p, lane_mask(n), a.v[0]);
  if (n > 8) _mm256_maskstore_ps(p + 8, lane_mask(n - 8), a.v[1]);
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])};
}
inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.v[0], b.v[0]), _mm256_sub_ps(a.v[1], b.v[1])}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.v[0], b.v[0]), _mm256_div_ps(a.v[1], b.v[1])}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1])}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.v[0], b.v[0]), _mm256_min_ps(a.v[1], b.v[1])}; }
inline Lanes round(Lanes a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.v[0], mode), _mm256_round_ps(a.v[1], mode)};
}
inline __m256 scale_by_power(__m256 a, __m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Lanes scale_by_power(Lanes a, Lanes n) {
  return {scale_by_power(a.v[0], n.v[0]), scale_by_power(a.v[1], n.v[1])};
}
inline Lanes keep_first(Lanes a, int n, Lanes other) {
  return {_mm256_blendv_ps(other.v[0], a.v[0], _mm256_castsi256_ps(lane_mask(n))),
          _mm256_blendv_ps(other.v[1], a.v[1], _mm256_castsi256_ps(lane_mask(n - 8)))};
}
inline Lanes load_half(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline __m256 widen_bfloat(__m128i a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
}
inline Lanes load_bfloat(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {widen_bfloat(_mm_loadu_si128(q)), widen_bfloat(_mm_loadu_si128(q + 1))};
}
inline Lanes load_int8(const void* p) {
  __m128i a = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)))};
}
inline Codes load_codes(const uint8_t* p) {
  __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))};
}
inline Codes shift_right(Codes a, int n) { return {_mm256_srli_epi32(a.v[0], n), _mm256_srli_epi32(a.v[1], n)}; }
inline Codes shift_left(Codes a, int n) { return {_mm256_slli_epi32(a.v[0], n), _mm256_slli_epi32(a.v[1], n)}; }
inline Codes keep_bits(Codes a, int mask) {
  __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(a.v[0], m), _mm256_and_si256(a.v[1], m)};
}
inline Codes operator|(Codes a, Codes b) {
  return {_mm256_or_si256(a.v[0], b.v[0]), _mm256_or_si256(a.v[1], b.v[1])};
}
inline __m256i bits_where(uint32_t lanes, int value) {
  __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bit), bit);
  return _mm256_and_si256(set, _mm256_set1_epi32(value));
}
inline Codes set_where(Codes a, uint32_t lanes, int value) {
  return {_mm256_or_si256(a.v[0], bits_where(lanes, value)), _mm256_or_si256(a.v[1], bits_where(lanes >> 8, value))};
}
inline Lanes to_float(Codes a) { return {_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}; }

inline float sum(Lanes a) {
  __m256 eight = _mm256_add_ps(a.v[0], a.v[1]);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

namespace detail {
template <int kLow, int kHigh>
inline __m256 fold_halves(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, kLow), _mm256_permute2f128_ps(a, b, kHigh));
}
template <int kLow, int kHigh>
inline __m256 fold_within(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, kLow), _mm256_shuffle_ps(a, b, kHigh));
}
}  // namespace detail

// Lane i of the result is `sum(a[i])`, the same additions in the same order; a transposition costs half of 16 sums.
[[gnu::always_inline]] inline Lanes sums(const Lanes (&a)[kLanes]) {
  Lanes result;
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    __m256 eights[8], fours[4], twos[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) eights[i] = _mm256_add_ps(a[8 * half + i].v[0], a[8 * half + i].v[1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) fours[i] = detail::fold_halves<0x20, 0x31>(eights[2 * i], eights[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) twos[i] = detail::fold_within<0x44, 0xEE>(fours[2 * i], fours[2 * i + 1]);
    __m256 ones = detail::fold_within<0x88, 0xDD>(twos[0], twos[1]);
    result.v[half] = _mm256_permutevar8x32_ps(ones, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  return result;
}

#else

// Four lanes: every machine has registers of this size, and the compiler has their arithmetic.
using Four = float __attribute__((vector_size(16)));

struct Lanes {
  Four v[4];
};
struct Codes {
  FourInts v[4];
};

template <class F>
inline Lanes each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
template <class F>
inline Codes each_code(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
template <class To, class From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
// A fused product where the machine has one; a library call per lane would be fifty times slower.
inline Four multiply_add(Four a, Four b, Four c) {
#if defined(__aarch64__)
  return bits_as<Four>(vfmaq_f32(bits_as<float32x4_t>(c), bits_as<float32x4_t>(a), bits_as<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}
inline Lanes zero() { return each([](int) { return Four{}; }); }
inline Lanes set(float x) { return each([=](int) { return Four{x, x, x, x}; }); }
inline Lanes load(const float* p) {
  Lanes a;
  std::memcpy(a.v, p, sizeof a.v);
  return a;
}
inline Lanes load(const float* p, int n) {
  Lanes a = zero();
  std::memcpy(a.v, p, n * sizeof(float));
  return a;
}
inline void store(float* p, Lanes a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store(float* p, Lanes a, int n) { std::memcpy(p, a.v, n * sizeof(float)); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return each([&](int i) { return multiply_add(a.v[i], b.v[i], c.v[i]); });
}
inline Lanes operator+(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Lanes operator-(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline Lanes operator*(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Lanes operator/(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Lanes max(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline Lanes min(Lanes a, Lanes b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
// To the nearest integers, ties to even; numbers are below 2^22 in magnitude. The sum has no bits for a fraction.
inline Lanes round(Lanes a) {
  const Lanes magic = set(12582912.0f);
  return a + magic - magic;
}
inline Lanes scale_by_power(Lanes a, Lanes n) {
  return each([&](int i) {
    // NaN has no integer; it reaches the result through `a`.
    const FourInts power = __builtin_convertvector(n.v[i], FourInts) & (n.v[i] == n.v[i]);
    return a.v[i] * bits_as<Four>((power + 127) << 23);
  });
}
inline Lanes keep_first(Lanes a, int n, Lanes other) {
  if (n > 0) std::memcpy(other.v, a.v, (n < kLanes ? n : kLanes) * sizeof(float));
  return other;
}
// Sixteen small integers as lanes.
template <class Integer>
inline Codes widen(const void* p) {
  Integer narrow[kLanes];
  int32_t wide[kLanes];
  std::memcpy(narrow, p, sizeof narrow);
  for (int i = 0; i < kLanes; i++) wide[i] = narrow[i];
  return bits_as<Codes>(wide);
}
inline Codes load_codes(const uint8_t* p) { return widen<uint8_t>(p); }
inline Codes shift_right(Codes a, int n) { return each_code([&](int i) { return a.v[i] >> n; }); }
inline Codes shift_left(Codes a, int n) { return each_code([&](int i) { return a.v[i] << n; }); }
inline Codes keep_bits(Codes a, int mask) { return each_code([&](int i) { return a.v[i] & mask; }); }
inline Codes operator|(Codes a, Codes b) { return each_code([&](int i) { return a.v[i] | b.v[i]; }); }
inline Codes set_where(Codes a, uint32_t lanes, int value) {
  const FourInts bits = {1, 2, 4, 8};
  return each_code([&](int i) { return a.v[i] | (((static_cast<int>(lanes >> 4 * i) & bits) != 0) & value); });
}
inline Lanes to_float(Codes a) { return each([&](int i) { return __builtin_convertvector(a.v[i], Four); }); }
inline Lanes load_int8(const void* p) { return to_float(widen<int8_t>(p)); }
inline Lanes load_half(const void* p) {
#if defined(__aarch64__)
  float16x4_t narrow[4];
  std::memcpy(narrow, p, sizeof narrow);
  return each([&](int i) { return bits_as<Four>(vcvt_f32_f16(narrow[i])); });
#else
  const Codes halves = widen<uint16_t>(p);
  return each([&](int i) {
    const FourInts h = halves.v[i], exponent = (h >> 10) & 31, fraction = h & 0x3FF, sign = (h & 0x8000) << 16;
    const FourInts tiny = bits_as<FourInts>(__builtin_convertvector(fraction, Four) * 5.9604644775390625e-8f);  // 2^-24
    // Infinities and NaN have the largest exponent in both formats.
    const FourInts wide = (exponent + 112 + (112 & (exponent == 31))) << 23 | fraction << 13;
    return bits_as<Four>(sign | (exponent == 0 ? tiny : wide));
  });
#endif
}
inline float half_to_float(uint16_t h) {
  const uint16_t one[kLanes] = {h};
  return load_half(one).v[0][0];
}
inline Lanes load_bfloat(const void* p) {
  const Codes upper = widen<uint16_t>(p);
  return each([&](int i) { return bits_as<Four>(upper.v[i] << 16); });
}

inline float sum(Lanes a) {
  const Four four = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

#endif

#if !defined(__AVX512F__)
struct Levels {
  Lanes scale, offset;
  Levels(float scale_, float offset_) : scale(set(scale_)), offset(set(offset_)) {}
  Lanes operator[](Codes c) const { return fma(to_float(keep_bits(c, 15)), scale, offset); }
};

#endif

#if !defined(__AVX512F__) && !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
inline Lanes sums(const Lanes (&a)[kLanes]) {
  float each_sum[kLanes];
  for (int i = 0; i < kLanes; i++) each_sum[i] = sum(a[i]);
  return load(each_sum);
}
#endif

// Hold a value that several products use in a register: GCC would load it again for each of them.
inline void hold(Lanes& a) {
#if defined(__AVX512F__) && defined(__GNUC__)
  asm("" : "+v"(a.v));
#elif defined(__AVX2__) && defined(__GNUC__)
  asm("" : "+x"(a.v[0]), "+x"(a.v[1]));
#else
  (void)a;
#endif
}

// One float16 value, as block formats keep their scales.
inline float read_half(const uint8_t* p) {
#if defined(__F16C__)
  uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return _cvtsh_ss(h);
#else
  uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return half_to_float(h);
#endif
}

// Write one float16: to nearest, ties to even; a NaN stays one.
inline void store_half(uint8_t* p, float x) {
#if defined(__F16C__)
  const uint16_t h = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  uint32_t half;
  if (magnitude > 0x7F800000) {
    half = 0x7E00;
  } else if (magnitude >= 0x477FF000) {  // from 65520 on
    half = 0x7C00;
  } else if (magnitude < 0x38800000) {  // below the smallest normal number: a multiple of 2^-24
    float positive;
    std::memcpy(&positive, &magnitude, sizeof positive);
    half = static_cast<uint32_t>(std::nearbyint(positive * 16777216.0f));
  } else {
    half = (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  }
  const uint16_t h = static_cast<uint16_t>(sign | half);
#endif
  std::memcpy(p, &h, sizeof h);
}

// e^x within 2 units in the last place; arguments are cut to [-87.3, 88.3], NaN stays.
// 2^n * e^r with |r| <= ln(2) / 2: Taylor's polynomial of degree 7 leaves 1e-8.
inline Lanes exp(Lanes x) {
  x = min(set(88.3f), max(set(-87.3f), x));
  Lanes n = round(x * set(1.44269504f));
  Lanes r = fma(n, set(-0.693359375f), x);  // ln(2) in two parts, the first of few bits
  r = fma(n, set(2.12194440e-4f), r);
  Lanes p = set(1.0f / 5040);
  p = fma(p, r, set(1.0f / 720));
  p = fma(p, r, set(1.0f / 120));
  p = fma(p, r, set(1.0f / 24));
  p = fma(p, r, set(1.0f / 6));
  p = fma(p, r, set(0.5f));
  p = fma(p, r, set(1.0f));
  p = fma(p, r, set(1.0f));
  return scale_by_power(p, n);
}

}  // namespace jaxspec
