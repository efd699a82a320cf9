// The best of the libraries built from these sources that this machine can run.

#include "amx.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)
bool has_avxvnni() {
#if __has_include(<avxvnniintrin.h>)  // else the compiler cannot build that library
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#else
  return false;
#endif
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}
#endif

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* jaxspec_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return !__builtin_cpu_supports("avx512vnni") ? "avx512" : jaxspec::ask_for_amx() ? "amx" : "vnni";
  // Older compilers do not know the name of F16C, which every machine with AVX2 and FMA has.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return has_avxvnni() ? "avxvnni" : "avx2";
#elif defined(__aarch64__) && defined(__APPLE__)
  if (has("hw.optional.arm.FEAT_DotProd")) return has("hw.optional.arm.FEAT_I8MM") ? "i8mm" : "dotprod";
#elif defined(__aarch64__) && defined(__linux__)
  if (getauxval(AT_HWCAP) >> 20 & 1) return getauxval(AT_HWCAP2) >> 13 & 1 ? "i8mm" : "dotprod";
#endif
  return "portable";
}
