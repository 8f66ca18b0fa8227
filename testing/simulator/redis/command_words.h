#ifndef DDP_TESTING_SIMULATOR_REDIS_COMMAND_WORDS_H_
#define DDP_TESTING_SIMULATOR_REDIS_COMMAND_WORDS_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

namespace ddp::testing {

// The words of Redis commands: functions that parse them and write numbers, as strictly as the
// server. Pure.

inline constexpr char kWrongType[] =
    "WRONGTYPE Operation against a key holding the wrong kind of value";
inline constexpr char kSyntax[] = "ERR syntax error";
inline constexpr char kNotInteger[] = "ERR value is not an integer or out of range";
inline constexpr char kNotFloat[] = "ERR value is not a valid float";
inline constexpr char kNotRange[] = "ERR min or max is not a float";

char Upper(char c);
char Lower(char c);

// Returns true when `text` equals `upper` in any case. `upper` is in upper case.
bool Is(std::string_view text, std::string_view upper);

// Parses an integer. Accepts no sign but '-', no space, no leading zero.
std::optional<int64_t> ToInteger(std::string_view text);
// Parses a number or an infinity. Accepts either sign; no space, no NaN.
std::optional<double> ToDouble(std::string_view text);

// A number as the server writes it.
class Number {
 public:
  explicit Number(double value);
  explicit Number(int64_t value);
  std::string_view text() const { return {text_.data(), size_}; }

 private:
  std::array<char, 40> text_;
  size_t size_;
};

// Bound of a range of scores: "1", "(1", "-inf". As in Redis, an empty number is 0.
struct Bound {
  double value = 0;
  bool exclusive = false;
};
std::optional<Bound> ToBound(std::string_view text);

// Converts the indexes of LRANGE and ZRANGE to a range [first, last) of `size` elements.
std::pair<int64_t, int64_t> Slice(int64_t start, int64_t stop, int64_t size);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_REDIS_COMMAND_WORDS_H_
