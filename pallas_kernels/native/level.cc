// Which of the libraries built from these sources this machine can run.

extern "C" __attribute__((visibility("default"))) const char* jaxspec_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return __builtin_cpu_supports("avx512vnni") ? "vnni" : "avx512";
  // Older compilers do not know the name of F16C, which every machine with AVX2 and FMA has.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "portable";
}
