#include "../native/handler.h"
#include "row_top.h"

namespace jaxspec {
namespace {

ffi::Error run_row_top(ffi::ThreadPool pool, Floats x, ffi::ResultBuffer<ffi::F32> best, ffi::ResultBuffer<ffi::S32> column,
                       ffi::ResultBuffer<ffi::F32> total, int64_t threads) {
  const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1], most = best->dimensions()[1];
  if (most < 1 || most > columns) return invalid("row_top: a row does not have so many numbers");
  XlaThreads workers(pool);
  row_top(workers, threads, x.typed_data(), rows, columns, most, best->typed_data(), column->typed_data(),
          total->element_count() ? total->typed_data() : nullptr);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

JAXSPEC_HANDLER(jaxspec_row_top, jaxspec::run_row_top,
                xla::ffi::Ffi::Bind()
                    .Ctx<xla::ffi::ThreadPool>()
                    .Arg<jaxspec::Floats>()
                    .Ret<jaxspec::Floats>()
                    .Ret<jaxspec::Ints>()
                    .Ret<jaxspec::Floats>()
                    .Attr<int64_t>("threads"));
