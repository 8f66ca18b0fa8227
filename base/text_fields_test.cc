#include "base/text_fields.h"

#include <cstdint>
#include <string>

#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(TextFieldsTest, NumbersAndWordsAreRead) {
  std::string word;
  int64_t number = 0;
  uint32_t other = 0;
  std::string rest;
  EXPECT_TRUE(ReadFields("left -3 12 a text\nof words", ' ', word, number, other, rest));
  EXPECT_EQ(word, "left");
  EXPECT_EQ(number, -3);
  EXPECT_EQ(other, 12);
  EXPECT_EQ(rest, "a text\nof words");
  EXPECT_TRUE(ReadFields("left ", ' ', word, rest));
  EXPECT_EQ(rest, "") << "an empty word is one";
}

TEST(TextFieldsTest, OtherTextsAreRefused) {
  std::string word;
  int number = 0;
  for (const char* text : {"", "left", "left x", "left 3 4", "left 3000000000"}) {
    EXPECT_FALSE(ReadFields(text, ' ', word, number)) << text;
  }
}

}  // namespace
}  // namespace ddp
