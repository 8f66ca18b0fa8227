#ifndef DDP_STATISTICS_BATCH_STATISTICS_H_
#define DDP_STATISTICS_BATCH_STATISTICS_H_

#include <cstdint>
#include <vector>

namespace ddp::internal {

// The statistics of a batch that is spread over the ranks, for each channel.
//
// Each rank describes its own samples by one row of numbers. A matrix has a row for each rank. A
// rank fills its own row and leaves zeros in the others, so the sum of all ranks' matrices holds
// every row without rounding. All ranks then merge the same rows in the same order, and get the
// same bits.
//
// The merge never subtracts the squares of two means, so a large mean costs no accuracy: Chan,
// Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
// 1979.
//
// Pure: no tensor, no collective.
struct BatchStatistics {
  // By channel. Zeros when no rank has a value.
  std::vector<double> mean;
  std::vector<double> squares;  // the sum of (value - mean)^2
  double count = 0;             // values in each channel
  bool input_gradient = false;  // some rank needs the gradient of its input
};

// Returns the number of numbers in a row: `channels` means, `channels` sums of squares of the
// differences from the mean, the count of values, and 1 or 0 for input_gradient.
int64_t RowSize(int64_t channels);

// Writes the last two numbers of a row of RowSize(channels) numbers. The caller writes the others.
void FinishRow(double* row, int64_t channels, double count, bool input_gradient);

// Returns the statistics over `ranks` rows, one after another. Rows with the count 0 change
// nothing, whatever else they hold.
BatchStatistics MergeRows(const double* rows, int ranks, int64_t channels);

}  // namespace ddp::internal

#endif  // DDP_STATISTICS_BATCH_STATISTICS_H_
