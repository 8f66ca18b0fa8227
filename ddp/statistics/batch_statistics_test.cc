#include "ddp/statistics/batch_statistics.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

namespace ddp::internal {
namespace {

// The row of one rank, from its values by channel.
std::vector<double> Row(const std::vector<std::vector<double>>& channels, bool gradient = false) {
  const auto size = static_cast<int64_t>(channels.size());
  std::vector<double> row(RowSize(size), 0);
  for (int64_t c = 0; c < size; ++c) {
    const std::vector<double>& values = channels[c];
    if (values.empty()) continue;
    double sum = 0;
    for (const double value : values) sum += value - values[0];
    row[c] = values[0] + sum / static_cast<double>(values.size());
    for (const double value : values) row[size + c] += (value - row[c]) * (value - row[c]);
  }
  FinishRow(row.data(), size, static_cast<double>(channels[0].size()), gradient);
  return row;
}

std::vector<double> Rows(const std::vector<std::vector<double>>& rows) {
  std::vector<double> all;
  for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
  return all;
}

TEST(BatchStatisticsTest, MergesRanksOfDifferentSizes) {
  const auto rows = Rows({Row({{1, 2, 3}, {0, 0, 6}}), Row({{10}, {2}}), Row({{4, 4}, {1, 3}})});
  const BatchStatistics all = MergeRows(rows.data(), 3, 2);
  EXPECT_EQ(all.count, 6);
  EXPECT_NEAR(all.mean[0], 4, 1e-15);
  EXPECT_NEAR(all.mean[1], 2, 1e-15);
  EXPECT_NEAR(all.squares[0], 9 + 4 + 1 + 36, 1e-13);
  EXPECT_NEAR(all.squares[1], 4 + 4 + 16 + 1 + 1, 1e-13);
  EXPECT_FALSE(all.input_gradient);
}

TEST(BatchStatisticsTest, ARankWithoutValuesChangesNothing) {
  std::vector<double> empty = Row({{}}, /*gradient=*/true);
  empty[0] = std::nan("");  // the mean of no values
  const auto rows = Rows({empty, Row({{5, 7}}), empty});
  const BatchStatistics all = MergeRows(rows.data(), 3, 1);
  EXPECT_EQ(all.count, 2);
  EXPECT_EQ(all.mean[0], 6);
  EXPECT_EQ(all.squares[0], 2);
  EXPECT_TRUE(all.input_gradient);
}

TEST(BatchStatisticsTest, NoRankHasAValue) {
  const auto rows = Rows({Row({{}}), Row({{}})});
  const BatchStatistics all = MergeRows(rows.data(), 2, 1);
  EXPECT_EQ(all.count, 0);
  EXPECT_EQ(all.mean[0], 0);
  EXPECT_EQ(all.squares[0], 0);
}

TEST(BatchStatisticsTest, ALargeMeanCostsNoAccuracy) {
  const double mean = 1.7e9;
  const auto rows = Rows({Row({{mean - 1, mean + 1}}), Row({{mean - 2, mean + 2, mean}})});
  const BatchStatistics all = MergeRows(rows.data(), 2, 1);
  EXPECT_EQ(all.mean[0], mean);
  EXPECT_NEAR(all.squares[0], 10, 1e-6);
}

}  // namespace
}  // namespace ddp::internal
