// The largest numbers of each row, and the logarithm of the sum of the exponentials of all.
//
// A row is cut into slices of one size, whose results are put together in order: its bits depend neither on the rows
// beside it nor on threads.
#pragma once

#include "../native/parallel.h"

namespace jaxspec {

// best[r * most + i], column[r * most + i]: the i-th largest number of row r and its place, of equal ones the first; NaN
// counts as -infinity, +infinity as the largest number, and -0 as 0. Where all that are left are -infinity, those that
// come first. `most` is at most `columns`.
// total[r]: the logarithm of the sum of e^x over the row, finite even for a row of -infinity; null where it is not wanted.
void row_top(ThreadPool& pool, int64_t threads, const float* x, int64_t rows, int64_t columns, int64_t most, float* best,
             int32_t* column, float* total);

}  // namespace jaxspec
