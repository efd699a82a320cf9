#include <algorithm>
#include <vector>

#include "../native/handler.h"
#include "weight_format.h"

namespace jaxspec {
namespace {

// Run `f(format, matrix)` on a weight buffer `[O, I]` of numbers or `[O, I / values, bytes]` of blocks.
template <class F>
ffi::Error with_weight(std::string_view name, const ffi::AnyBuffer& weight, int64_t inputs, F f) {
  const WeightFormat* format = find_format(name);
  if (!format) return invalid("unknown weight format " + std::string(name));
  const int64_t outputs = weight.dimensions()[0], size = static_cast<int64_t>(weight.size_bytes());
  if (!format->fits(outputs, inputs, size))
    return invalid("a weight of " + std::to_string(size) + " bytes does not hold " + std::to_string(outputs) + " x " +
                   std::to_string(inputs) + " weights in " + std::string(name));
  f(*format, Matrix{bytes(weight), outputs, inputs, format->row_bytes(inputs)});
  return ffi::Error::Success();
}

ffi::Error run_linear(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer weight, Scalar active_rows,
                      ffi::ResultBuffer<ffi::F32> y, std::string_view name, int64_t threads) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = weight.dimensions()[0];
  if (rows == 0 || outputs == 0) return ffi::Error::Success();
  const int64_t count = count_active_rows(active_rows, rows);
  XlaThreads workers(pool);
  return with_weight(name, weight, inputs, [&](const WeightFormat& format, const Matrix& w) {
    linear(format, workers, threads, x.typed_data(), count, w, y->typed_data());
  });
}

ffi::Error run_swiglu(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer weight, Scalar active_rows,
                      ffi::ResultBuffer<ffi::F32> y, std::string_view name, int64_t threads) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], columns = weight.dimensions()[0] / 2;
  if (rows == 0 || columns == 0) return ffi::Error::Success();
  const int64_t count = count_active_rows(active_rows, rows);
  XlaThreads workers(pool);
  return with_weight(name, weight, inputs, [&](const WeightFormat& format, const Matrix& w) {
    swiglu(format, workers, threads, x.typed_data(), count, w, y->typed_data());
  });
}

// Rows of a weight. Where the operation `moves`, it ends on one of the pool's threads, and what follows usually runs
// there. The client's own thread would be one more than there are cores, and a pool's thread that waits for work spins.
ffi::Future run_take_rows(ffi::ThreadPool pool, ffi::AnyBuffer weight, Ints index, ffi::ResultBuffer<ffi::F32> y,
                          std::string_view name, bool moves) {
  const int64_t outputs = weight.dimensions()[0], inputs = y->dimensions()[1];
  const int64_t rows = static_cast<int64_t>(index.element_count());
  ffi::Promise promise;
  ffi::Future future(promise);
  ffi::Error error = with_weight(name, weight, inputs, [&](const WeightFormat& format, const Matrix& w) {
    // Buffers are described by the call, which may be over by then.
    auto take = [promise, &format, w, outputs, inputs, rows, from = index.typed_data(), to = y->typed_data()]() mutable {
      for (int64_t r = 0; r < rows; r++)
        format.unpack(w, std::clamp<int64_t>(from[r], 0, outputs - 1), to + r * inputs);
      promise.SetAvailable();
    };
    if (moves) pool.Schedule(std::move(take));
    else take();
  });
  if (!error.success()) promise.SetError(std::move(error));
  return future;
}

}  // namespace
}  // namespace jaxspec

// Pack rows of blocks as a file has them, `outputs` rows of `blocks` each, for integer products. 0 if `name` is none
// of a packed format.
extern "C" __attribute__((visibility("default"))) int jaxspec_pack(const char* name, const uint8_t* rows,
                                                                   int64_t outputs, int64_t blocks, uint8_t* out) {
  const jaxspec::WeightFormat* format = jaxspec::find_format(name);
  if (!format || !format->pack) return 0;
  format->pack(rows, outputs, blocks, out);
  return 1;
}

#define JAXSPEC_PRODUCT(name, function)                \
  JAXSPEC_HANDLER(name, jaxspec::function,             \
                  xla::ffi::Ffi::Bind()                \
                      .Ctx<xla::ffi::ThreadPool>()     \
                      .Arg<jaxspec::Floats>()          \
                      .Arg<xla::ffi::AnyBuffer>()      \
                      .Arg<jaxspec::Scalar>()          \
                      .Ret<jaxspec::Floats>()          \
                      .Attr<std::string_view>("format") \
                      .Attr<int64_t>("threads"))

JAXSPEC_PRODUCT(jaxspec_linear, run_linear);
JAXSPEC_PRODUCT(jaxspec_swiglu, run_swiglu);
JAXSPEC_HANDLER(jaxspec_take_rows, jaxspec::run_take_rows,
                xla::ffi::Ffi::Bind()
                    .Ctx<xla::ffi::ThreadPool>()
                    .Arg<xla::ffi::AnyBuffer>()
                    .Arg<jaxspec::Ints>()
                    .Ret<jaxspec::Floats>()
                    .Attr<std::string_view>("format")
                    .Attr<bool>("moves"));
