#include "ddp/statistics/batch_statistics.h"

namespace ddp::internal {

int64_t RowSize(int64_t channels) { return 2 * channels + 2; }

void FinishRow(double* row, int64_t channels, double count, bool input_gradient) {
  row[2 * channels] = count;
  row[2 * channels + 1] = input_gradient ? 1 : 0;
}

BatchStatistics MergeRows(const double* rows, int ranks, int64_t channels) {
  BatchStatistics all;
  all.mean.assign(channels, 0);
  all.squares.assign(channels, 0);
  for (int rank = 0; rank < ranks; ++rank) {
    const double* const row = rows + rank * RowSize(channels);
    const double count = row[2 * channels];
    if (row[2 * channels + 1] != 0) all.input_gradient = true;
    if (count == 0) continue;
    const double total = all.count + count;
    for (int64_t c = 0; c < channels; ++c) {
      const double difference = row[c] - all.mean[c];
      all.mean[c] += difference * (count / total);
      all.squares[c] += row[channels + c] + difference * difference * (all.count * (count / total));
    }
    all.count = total;
  }
  return all;
}

}  // namespace ddp::internal
