#include "launcher/flags/flag_reader.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;

absl::Status CheckRole(const std::string& role, size_t max_characters = 128) {
  return FlagReader(GivenFlags{{"role", {role, "--role"}}}).CheckName("role", max_characters);
}

TEST(FlagReaderTest, NamesAreLimitedInCharactersNotInBytes) {
  for (const std::string character : {"a", "\u00e9", "\u8a13", "\U0001F916"}) {
    std::string name;
    for (int i = 0; i < 128; ++i) name += character;
    EXPECT_TRUE(CheckRole(name).ok()) << CheckRole(name);
    EXPECT_THAT(CheckRole(name + character).message(),
                HasSubstr("expected 1 to 128 printable characters"));
    EXPECT_TRUE(CheckRole(name + character, 129).ok());
  }
  EXPECT_TRUE(CheckRole(std::string(128, '\xe9')).ok()) << "Latin-1";
  EXPECT_FALSE(CheckRole(std::string(129, '\x80')).ok()) << "bytes that begin no character";
}

TEST(FlagReaderTest, NamesArePrintable) {
  EXPECT_FALSE(CheckRole("").ok());
  EXPECT_FALSE(CheckRole("a\nb").ok());
  EXPECT_FALSE(CheckRole("a\x7f").ok());
}

}  // namespace
}  // namespace ddp::launcher
