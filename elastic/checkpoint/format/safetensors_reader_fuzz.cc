// Fuzzes the reader of safetensors files. The tensors of an accepted header must tile the file's
// data. The header that our writer makes of them must be read as the same tensors. Loading must
// read no byte outside of the file.
#include "elastic/checkpoint/format/safetensors_reader.h"

#include <glog/logging.h>

#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/safetensors_writer.h"
#include "elastic/checkpoint/format/tensor_view.h"
#include "testing/fuzz_target.h"

namespace ddp::elastic {
namespace {

// A file whose length field changes after the first read.
class ChangingFile final : public ReadableFile {
 public:
  ChangingFile(absl::string_view content, char change) : content_(content), change_(change) {}

  uint64_t size() const override { return content_.size(); }

  absl::Status Read(uint64_t offset, char* buffer, size_t bytes) const override {
    CHECK(offset <= content_.size() && bytes <= content_.size() - offset)
        << bytes << " bytes at " << offset << " of " << content_.size();
    std::memcpy(buffer, content_.data() + offset, bytes);
    if (offset == 0 && bytes > 0 && std::exchange(is_read_, true)) buffer[0] ^= change_;
    return absl::OkStatus();
  }

 private:
  const absl::string_view content_;
  const char change_;
  mutable bool is_read_ = false;
};

void CheckError(const absl::Status& status) {
  CHECK(absl::IsDataLoss(status)) << status;
  CHECK(testing::IsOneLine(status.message())) << status;
}

// Checks that tensors written by our writer are read as the same tensors.
void CheckRewritten(const std::vector<StoredTensor>& tensors, uint64_t data_begin) {
  std::vector<TensorView> views;
  for (const StoredTensor& tensor : tensors) {
    views.push_back({tensor.name, tensor.type, nullptr, tensor.bytes});
  }
  const absl::StatusOr<std::string> header = EncodeSafetensorsHeader(views);
  CHECK(header.ok()) << header.status();
  const uint64_t data_bytes =
      tensors.empty() ? 0 : tensors.back().offset + tensors.back().bytes - data_begin;
  if (data_bytes > std::numeric_limits<uint64_t>::max() - header->size()) return;
  const auto again = ParseSafetensorsHeader(*header, header->size() + data_bytes);
  CHECK(again.ok()) << again.status();
  CHECK_EQ(again->size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    CHECK_EQ((*again)[i].name, tensors[i].name);
    CHECK((*again)[i].type == tensors[i].type) << tensors[i].name;
    CHECK_EQ((*again)[i].bytes, tensors[i].bytes);
    CHECK_EQ((*again)[i].offset - header->size(), tensors[i].offset - data_begin);
  }
}

void CheckHeader(const std::string& start, uint64_t file_bytes) {
  const auto tensors = ParseSafetensorsHeader(start, file_bytes);
  if (!tensors.ok()) return CheckError(tensors.status());
  const absl::StatusOr<uint64_t> end = SafetensorsHeaderEnd(start.data(), file_bytes);
  CHECK(end.ok() && *end <= start.size()) << end.status();
  uint64_t place = *end;
  std::set<std::string> names;
  for (const StoredTensor& tensor : *tensors) {
    CHECK_EQ(tensor.offset, place) << tensor.name;
    CHECK_LE(tensor.bytes, file_bytes - place) << tensor.name;
    CHECK(TensorBytes(tensor.type.dtype, tensor.type.shape) == tensor.bytes) << tensor.name;
    CHECK(names.insert(tensor.name).second) << tensor.name;
    place += tensor.bytes;
  }
  CHECK_EQ(place, file_bytes);
  CheckRewritten(*tensors, *end);
}

void CheckFile(absl::string_view content, char change) {
  const auto loaded = LoadSafetensors(ChangingFile(content, change), "file");
  if (!loaded.ok()) return CheckError(loaded.status());
  CHECK_EQ(loaded->bytes, content.size());
  if (change == 0) CHECK(loaded->hash == ContentHash::Of(content.data(), content.size()));
  CHECK_EQ(loaded->tensors.size(), loaded->stored.size());
  for (size_t i = 0; i < loaded->tensors.size(); ++i) {
    const StoredTensor& stored = loaded->stored[i];
    CHECK_LE(stored.offset + stored.bytes, content.size());
    CHECK_EQ(absl::string_view(loaded->tensors[i].data, loaded->tensors[i].bytes),
             content.substr(stored.offset, stored.bytes));
    CHECK(loaded->hashes[i] == ContentHash::Of(content.data() + stored.offset, stored.bytes));
  }
}

}  // namespace
}  // namespace ddp::elastic

namespace ddp::testing {

// After an even first byte: a whole file. After an odd first byte: the number of bytes of the
// file's data, which may exceed any input, and the header's JSON.
void FuzzOne(absl::string_view bytes) {
  FuzzInput input(bytes);
  const uint8_t kind = input.TakeByte();
  if (kind % 2 == 0) {
    elastic::CheckHeader(std::string(input.rest()), input.rest().size());
    elastic::CheckFile(input.rest(), static_cast<char>(kind));
    return;
  }
  const uint64_t data_bytes = input.TakeNumber();
  const std::string start = FuzzNumber(input.rest().size()) + std::string(input.rest());
  if (data_bytes > std::numeric_limits<uint64_t>::max() - start.size()) return;
  elastic::CheckHeader(start, start.size() + data_bytes);
}

std::vector<std::string> FuzzSeeds() {
  const auto header = [](uint64_t data_bytes, const std::string& json) {
    return absl::StrCat("\x01", FuzzNumber(data_bytes), json);
  };
  const std::string small = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                            R"("b":{"dtype":"BOOL","shape":[],"data_offsets":[8,9]}})";
  const std::string file = absl::StrCat(FuzzNumber(small.size()), small, "123456789");
  return {
      absl::StrCat(std::string(1, '\0'), file),
      absl::StrCat("\x40", file),
      header(9, small),
      header(0, R"({"__metadata__":{"format":"pt"}}   )"),
      header(0, R"({"e":{"shape":[0,18446744073709551615],"dtype":"I64","data_offsets":[0,0]}})"),
      header(uint64_t{1} << 40,
             R"({"w":{"dtype":"BF16","shape":[1048576,524288],"data_offsets":[0,1099511627776]}})"),
      header(6, R"({"\u00e9\u0000":{"dtype":"F8_E4M3","shape":[2,3],"data_offsets":[0,6]}})")};
}

}  // namespace ddp::testing
