// Permission for AMX: Linux keeps the tiles of the processes that ask for it.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxspec {

// Ask for it. False where the processor or the system has no AMX, or the compiler cannot build its level.
inline bool ask_for_amx() {
#if defined(__x86_64__) && defined(__linux__)
#if __has_include(<amxint8intrin.h>) || __has_include(<amxintrin.h>)  // GCC's and Clang's
  constexpr int kAskPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;
  return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
#endif
#endif
  return false;
}

}  // namespace jaxspec
