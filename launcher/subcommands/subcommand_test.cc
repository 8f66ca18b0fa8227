#include "launcher/subcommands/subcommand.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;

bool Always(const std::string&) { return true; }
bool Never(const std::string&) { return false; }

TEST(IsSubcommandTest, IsTheFirstWordUnlessItIsAProgram) {
  EXPECT_TRUE(IsSubcommand("status", {"status"}, &Never));
  EXPECT_TRUE(IsSubcommand("status", {"status", "--json"}, &Never));
  EXPECT_FALSE(IsSubcommand("status", {"status"}, &Always));
  EXPECT_FALSE(IsSubcommand("status", {}, &Never));
  EXPECT_FALSE(IsSubcommand("status", {"--", "status"}, &Never));
  EXPECT_FALSE(IsSubcommand("status", {"--nnodes=1", "status"}, &Never));
  EXPECT_FALSE(IsSubcommand("status", {"./status"}, &Never));
  EXPECT_TRUE(IsSubcommand("checkpoint", {"checkpoint", "ls"}, &Never));
  EXPECT_FALSE(IsSubcommand("checkpoint", {"status"}, &Never));
}

TEST(HiddenSubcommandHintTest, AFileThatHidesItIsNamed) {
  EXPECT_THAT(HiddenSubcommandHint({"status", "--json"}),
              HasSubstr("the file status in this folder hides the subcommand 'ddprun status'"));
  EXPECT_THAT(HiddenSubcommandHint({"checkpoint"}), HasSubstr("'ddprun checkpoint'"));
  EXPECT_EQ(HiddenSubcommandHint({"--", "status"}), "");
  EXPECT_EQ(HiddenSubcommandHint({}), "");
}

TEST(ProgramExistsTest, LooksWhereAProgramWouldBeFound) {
  EXPECT_TRUE(ProgramExists("sh"));
  EXPECT_FALSE(ProgramExists("no_such_program_anywhere"));
}

}  // namespace
}  // namespace ddp::launcher
