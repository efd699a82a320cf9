// The libraries built from these sources that this machine can run, the best one first.

#include <string>

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

extern "C" __attribute__((visibility("default"))) const char* jaxspec_levels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Older compilers do not know the name of F16C, which every machine with AVX2 and FMA has.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni"), amx = vnni && jaxspec::ask_for_amx();
  static const std::string levels = std::string(amx ? "amx " : "") + (vnni ? "vnni " : "") + (avx512 ? "avx512 " : "") +
                                    (avx2 && has_avxvnni() ? "avxvnni " : "") + (avx2 ? "avx2 " : "") + "portable";
  return levels.c_str();
#else
  bool dotprod = false, i8mm = false;
#if defined(__aarch64__) && defined(__APPLE__)
  dotprod = has("hw.optional.arm.FEAT_DotProd"), i8mm = has("hw.optional.arm.FEAT_I8MM");
#elif defined(__aarch64__) && defined(__linux__)
  dotprod = getauxval(AT_HWCAP) >> 20 & 1, i8mm = getauxval(AT_HWCAP2) >> 13 & 1;
#endif
  return !dotprod ? "portable" : i8mm ? "i8mm dotprod portable" : "dotprod portable";
#endif
}
