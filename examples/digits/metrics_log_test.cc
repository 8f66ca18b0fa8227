#include "examples/digits/metrics_log.h"

#include <fstream>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::examples {
namespace {

std::string Content(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string Path() {
  return ::testing::TempDir() + ::testing::UnitTest::GetInstance()->current_test_info()->name();
}

TEST(MetricsLogTest, CutsBackToTheRestoredStep) {
  const MetricsLog log(Path());
  ASSERT_TRUE(log.Append({.step = 10, .epoch = 0, .loss = 0.5}).ok());
  const std::string first = Content(Path());
  ASSERT_TRUE(log.Append({.step = 20, .epoch = 1, .loss = 0.25}).ok());
  ASSERT_TRUE(log.CutBackTo(10).ok());
  EXPECT_EQ(Content(Path()), first);
  EXPECT_THAT(first, ::testing::HasSubstr("\"step\":10"));
}

TEST(MetricsLogTest, DropsALineThatWasNotFinished) {
  const MetricsLog log(Path());
  ASSERT_TRUE(log.Append({.step = 10}).ok());
  const std::string first = Content(Path());
  std::ofstream(Path(), std::ios::app) << "{\"step\":20,\"epo";
  ASSERT_TRUE(log.CutBackTo(1000).ok());
  EXPECT_EQ(Content(Path()), first);
}

TEST(MetricsLogTest, NoFileIsFineAndAFolderThatIsMissingIsNot) {
  EXPECT_TRUE(MetricsLog(Path()).CutBackTo(0).ok());
  EXPECT_EQ(Content(Path()), "");
  EXPECT_THAT(std::string(MetricsLog("/nonexistent/m").CutBackTo(0).message()),
              ::testing::HasSubstr("/nonexistent/m"));
  EXPECT_THAT(std::string(MetricsLog("/nonexistent/m").Append({}).message()),
              ::testing::HasSubstr("/nonexistent/m"));
}

}  // namespace
}  // namespace ddp::examples
