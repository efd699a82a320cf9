#include <vector>

#include "../native/handler.h"
#include "packed_product.h"

namespace jaxspec {
namespace {

// A weight buffer: `[O, I]` numbers, or `[O, I / values, bytes]` blocks.
Matrix matrix_of(const ffi::AnyBuffer& weight, int64_t inputs) {
  const int64_t outputs = weight.dimensions()[0];
  return {bytes(weight), outputs ? static_cast<int64_t>(weight.size_bytes()) / outputs : 0, inputs};
}

template <class Format>
bool fits(const Matrix& w) {
  return w.inputs % Format::kValues == 0 && w.row_bytes == w.inputs / Format::kValues * Format::kBytes;
}

// Run `f(format)` if the weight has that format.
template <class F>
ffi::Error with_weight(std::string_view name, const Matrix& w, F f) {
  ffi::Error error = ffi::Error::Success();
  const bool known = with_format(name, [&](auto format) {
    if (fits<decltype(format)>(w)) return f(format);
    error = invalid("a weight row of " + std::to_string(w.row_bytes) + " bytes does not hold " +
                    std::to_string(w.inputs) + " weights in " + std::string(name));
  });
  return known ? error : invalid("unknown weight format " + std::string(name));
}

// A packed weight buffer `[O, I / values, bytes]`, and `f(format, planes, matrix)` if `name` is a packed format; whether it is one.
template <class F>
bool with_packed(std::string_view name, const ffi::AnyBuffer& weight, int64_t inputs, ffi::Error& error, F f) {
  return with_packed_format(name, [&](auto format, auto planes) {
    using Format = decltype(format);
    const int64_t outputs = weight.dimensions()[0], blocks = inputs / Format::kValues;
    if (inputs % Format::kValues || static_cast<int64_t>(weight.size_bytes()) != outputs * blocks * Format::kBytes) {
      error = invalid("a weight of " + std::to_string(weight.size_bytes()) + " bytes does not hold " +
                      std::to_string(outputs) + " x " + std::to_string(inputs) + " weights in " + std::string(name));
    } else {
      f(format, planes, PackedMatrix{bytes(weight), outputs, blocks});
    }
  });
}

void clear(float* y, int64_t from, int64_t to) { std::fill(y + from, y + to, 0.0f); }

ffi::Error run_linear(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer weight, Scalar active_rows,
                      ffi::ResultBuffer<ffi::F32> y, std::string_view format, int64_t threads) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = weight.dimensions()[0];
  const Matrix w = matrix_of(weight, inputs);
  if (rows == 0 || outputs == 0) return ffi::Error::Success();
  const int64_t count = count_active_rows(active_rows, rows);
  ffi::Error error = ffi::Error::Success();
  if (with_packed(format, weight, inputs, error, [&](auto kind, auto planes, const PackedMatrix& packed) {
        linear_packed<decltype(kind), planes()>(pool, threads, x.typed_data(), count, packed, y->typed_data());
        clear(y->typed_data(), count * outputs, rows * outputs);
      }))
    return error;
  return with_weight(format, w, [&](auto kind) {
    linear<decltype(kind)>(pool, threads, x.typed_data(), count, w, outputs, y->typed_data());
    clear(y->typed_data(), count * outputs, rows * outputs);
  });
}

ffi::Error run_swiglu(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer weight, Scalar active_rows,
                      ffi::ResultBuffer<ffi::F32> y, std::string_view format, int64_t threads) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], columns = weight.dimensions()[0] / 2;
  const Matrix w = matrix_of(weight, inputs);
  if (rows == 0 || columns == 0) return ffi::Error::Success();
  const int64_t count = count_active_rows(active_rows, rows);
  ffi::Error error = ffi::Error::Success();
  if (with_packed(format, weight, inputs, error, [&](auto kind, auto planes, const PackedMatrix& packed) {
        swiglu_packed<decltype(kind), planes()>(pool, threads, x.typed_data(), count, packed, y->typed_data());
        clear(y->typed_data(), count * columns, rows * columns);
      }))
    return error;
  return with_weight(format, w, [&](auto kind) {
    swiglu<decltype(kind)>(pool, threads, x.typed_data(), count, w, columns, y->typed_data());
    clear(y->typed_data(), count * columns, rows * columns);
  });
}

ffi::Error run_take_rows(ffi::AnyBuffer weight, Ints index, ffi::ResultBuffer<ffi::F32> y, std::string_view format) {
  const int64_t outputs = weight.dimensions()[0], rows = static_cast<int64_t>(index.element_count());
  if (rows == 0) return ffi::Error::Success();
  const Matrix w = matrix_of(weight, y->dimensions()[1]);
  std::vector<int32_t> rows_of(index.typed_data(), index.typed_data() + rows);
  for (int32_t& i : rows_of) i = static_cast<int32_t>(std::clamp<int64_t>(i, 0, outputs - 1));
  ffi::Error error = ffi::Error::Success();
  if (with_packed(format, weight, y->dimensions()[1], error, [&](auto kind, auto, const PackedMatrix& packed) {
        take_packed_rows<decltype(kind)>(packed, rows_of.data(), rows, y->typed_data());
      }))
    return error;
  return with_weight(format, w, [&](auto kind) { take_rows<decltype(kind)>(w, rows_of.data(), rows, y->typed_data()); });
}

}  // namespace
}  // namespace jaxspec

// Pack rows of blocks as a file has them, `outputs` rows of `blocks` each, for integer products. 0 if `format` is none
// that can be packed.
extern "C" __attribute__((visibility("default"))) int jaxspec_pack(const char* format, const uint8_t* rows,
                                                                   int64_t outputs, int64_t blocks, uint8_t* out) {
  return jaxspec::with_packed_format(
      format, [=](auto kind, auto) { jaxspec::pack_rows<decltype(kind)>(rows, outputs, blocks, out); });
}

#define JAXSPEC_PRODUCT(name, function)                                                          \
  JAXSPEC_HANDLER(name, jaxspec::function,                                         \
                                xla::ffi::Ffi::Bind()                                            \
                                    .Ctx<xla::ffi::ThreadPool>()                                 \
                                    .Arg<jaxspec::Floats>()                                      \
                                    .Arg<xla::ffi::AnyBuffer>()                                  \
                                    .Arg<jaxspec::Scalar>()                                      \
                                    .Ret<jaxspec::Floats>()                                      \
                                    .Attr<std::string_view>("format")                            \
                                    .Attr<int64_t>("threads"))

JAXSPEC_PRODUCT(jaxspec_linear, run_linear);
JAXSPEC_PRODUCT(jaxspec_swiglu, run_swiglu);
JAXSPEC_HANDLER(jaxspec_take_rows, jaxspec::run_take_rows,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jaxspec::Ints>()
                                  .Ret<jaxspec::Floats>()
                                  .Attr<std::string_view>("format"));
