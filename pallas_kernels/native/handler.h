// Shared by the XLA handlers of all operations.
//
// Handlers (`*/cpu.cc`) are compiled once and linked into the library of each instruction set. So they must not include
// `lanes.h`: the compiler's copy of an inline function there would take the place of the instruction set's own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Scalar = ffi::BufferR0<ffi::S32>;

inline const uint8_t* bytes(const ffi::AnyBuffer& buffer) { return static_cast<const uint8_t*>(buffer.untyped_data()); }

// How many of `rows` rows are to be computed: what the program found out at run time, within bounds.
inline int64_t count_active_rows(const Scalar& active_rows, int64_t rows) {
  return std::clamp<int64_t>(*active_rows.typed_data(), rows > 0 ? 1 : 0, rows);
}

// Zeros. Not a loop: handlers are compiled with few optimisations.
inline void clear(float* y, int64_t count) { std::memset(y, 0, count * sizeof(float)); }

// XLA's threads.
class XlaThreads final : public ThreadPool {
 public:
  explicit XlaThreads(ffi::ThreadPool& pool) : pool_(pool) {}

  int64_t num_threads() const override { return pool_.num_threads(); }
  void schedule(std::shared_ptr<Job> job) override {
    pool_.Schedule([job] { job->run(); });
  }

 private:
  ffi::ThreadPool& pool_;
};

inline ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument(message); }

}  // namespace jaxspec

// The one kind of symbol that the library shows.
#define JAXSPEC_HANDLER(name, function, binding)                                                      \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)
