// The native library with a stopwatch around each operation, for `bench_overhead.py`.
//
// It forwards every symbol to the library that the environment variable JAXSPEC_TIMED names.
#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>

#include "xla/ffi/api/c_api.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

template <class Function>
Function find(const char* name) {
  static void* library = dlopen(std::getenv("JAXSPEC_TIMED"), RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function>(dlsym(library, name));
}

// Operations of one program run one after the other, those of two programs do not run at the same time.
int64_t nanoseconds = 0, calls = 0;
bool skips = false;

XLA_FFI_Error* run(Handler handler, XLA_FFI_CallFrame* frame) {
  if (frame->extension_start || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return handler(frame);
  calls++;
  if (skips) return nullptr;
  const auto start = std::chrono::steady_clock::now();
  XLA_FFI_Error* error = handler(frame);
  nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  return error;
}

}  // namespace

#define OPERATION(name)                                      \
  EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {     \
    static const Handler handler = find<Handler>(#name);     \
    return run(handler, frame);                              \
  }
OPERATIONS

EXPORT const char* jaxspec_level() { return find<const char* (*)()>("jaxspec_level")(); }

EXPORT int jaxspec_pack(const char* format, const uint8_t* rows, int64_t outputs, int64_t blocks, uint8_t* out) {
  using Pack = int (*)(const char*, const uint8_t*, int64_t, int64_t, uint8_t*);
  static const Pack pack = find<Pack>("jaxspec_pack");
  return pack(format, rows, outputs, blocks, out);
}

// From now on operations return at once, and leave what is in their results.
EXPORT void skip_operations() { skips = true; }

// Nanoseconds within operations and their calls since the last time.
EXPORT void read_stopwatch(int64_t* out) {
  out[0] = nanoseconds;
  out[1] = calls;
  nanoseconds = calls = 0;
}
