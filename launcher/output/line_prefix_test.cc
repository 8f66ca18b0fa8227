#include "launcher/output/line_prefix.h"

#include <gtest/gtest.h>

namespace ddp::launcher {
namespace {

TEST(LinePrefixTest, ReplacesWhatHasAValueAndLeavesTheRest) {
  const std::map<std::string, std::string> values = {
      {"role_name", "trainer"}, {"local_rank", "1"}, {"rank", "5"}, {"hostname", "a-12"}};
  const auto expand = [&](const std::string& text) { return ExpandTemplate(text, values); };
  EXPECT_EQ(expand("[${role_name}${local_rank}]:"), "[trainer1]:");
  EXPECT_EQ(expand("${hostname}/${rank}> "), "a-12/5> ");
  EXPECT_EQ(expand("$rank$hostname-$rank_"), "5a-12-$rank_");
  EXPECT_EQ(expand("$$rank costs $5, ${nobody} ${rank"), "$rank costs $5, ${nobody} ${rank");
  EXPECT_EQ(expand("${} ${-} $"), "${} ${-} $");
  EXPECT_EQ(expand(""), "");
  // A value is not expanded again.
  EXPECT_EQ(ExpandTemplate("$a", {{"a", "$b"}, {"b", "x"}}), "$b");
}

}  // namespace
}  // namespace ddp::launcher
