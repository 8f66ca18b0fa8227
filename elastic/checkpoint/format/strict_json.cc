#include "elastic/checkpoint/format/strict_json.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace ddp::elastic {
namespace {

using nlohmann::json;

constexpr size_t kDepthMax = 16;
constexpr int64_t kValuesMax = 20'000'000;

class Builder final : public nlohmann::json_sax<json> {
 public:
  json TakeResult() { return std::move(root_); }
  const std::string& error() const { return error_; }

  bool null() override { return Add(json()); }
  bool boolean(bool value) override { return Add(json(value)); }
  bool number_integer(number_integer_t value) override { return Add(json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return Add(json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return Add(json(value)); }
  bool string(string_t& value) override { return Add(json(std::move(value))); }
  bool binary(binary_t&) override { return Fail("binary data"); }
  bool start_object(size_t) override { return Open(json::object()); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    if (open_.back()->contains(name)) {
      return Fail(absl::StrCat("the key \"", absl::CHexEscape(name.substr(0, 200)), "\" twice"));
    }
    key_ = name;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    if (error_.empty()) error_ = absl::StrCat("no JSON at byte ", position);
    return false;
  }

 private:
  bool Fail(const std::string& what) {
    error_ = absl::StrCat("JSON with ", what);
    return false;
  }

  bool Add(json value) {
    if (++values_ > kValuesMax) return Fail(absl::StrCat("more than ", kValuesMax, " values"));
    if (open_.empty()) {
      root_ = std::move(value);
      added_ = &root_;
    } else if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      added_ = &open_.back()->back();
    } else {
      json& place = (*open_.back())[key_];
      place = std::move(value);
      added_ = &place;
    }
    return true;
  }

  // Pointers in `open_` stay valid: a container gets no other element until its open element is
  // closed.
  bool Open(json value) {
    if (open_.size() == kDepthMax) return Fail(absl::StrCat("more than ", kDepthMax, " levels"));
    if (!Add(std::move(value))) return false;
    open_.push_back(added_);
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  json root_;
  std::vector<json*> open_;
  json* added_ = nullptr;
  std::string key_;
  int64_t values_ = 0;
  std::string error_;
};

}  // namespace

absl::StatusOr<nlohmann::json> ParseStrictJson(const std::string& text) {
  Builder builder;
  if (!json::sax_parse(text, &builder)) return absl::DataLossError(builder.error());
  return builder.TakeResult();
}

bool IsUtf8(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

}  // namespace ddp::elastic
