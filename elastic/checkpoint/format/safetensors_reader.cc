#include "elastic/checkpoint/format/safetensors_reader.h"

#include <algorithm>
#include <new>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

constexpr uint64_t kHeaderBytesMax = 100'000'000;  // of the format
constexpr uint64_t kLengthBytes = 8;
constexpr size_t kDimensionsMax = 64;  // LibTorch's own bound
constexpr size_t kTileBytes = size_t{1} << 20;

absl::Status Broken(const std::string& what) { return absl::DataLossError(what); }

// Escapes and shortens a name from a hostile file, for a message.
std::string Quoted(const std::string& name) {
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, 200)), "\"");
}

// Checks the header token by token against its only allowed structure. Stops at the first token
// that does not fit, so that nothing hostile is stored.
class HeaderHandler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  const std::string& error() const { return error_; }
  std::vector<StoredTensor> TakeTensors() { return std::move(tensors_); }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kTop;
        return true;
      case Place::kTopValue:
        place_ = Place::kTensor;
        has_dtype_ = has_shape_ = has_offsets_ = false;
        return true;
      case Place::kMetadata:
        place_ = Place::kMetadataEntries;
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool key(string_t& name) override {
    switch (place_) {
      case Place::kTop:
        if (name == "__metadata__") {
          place_ = Place::kMetadata;
          return true;
        }
        tensors_.emplace_back();
        tensors_.back().name = name;
        place_ = Place::kTopValue;
        return true;
      case Place::kMetadataEntries:
        return true;
      case Place::kTensor:
        return TensorKey(name);
      default:
        return Unexpected("a key");
    }
  }

  bool end_object() override {
    switch (place_) {
      case Place::kTensor:
        if (!has_dtype_ || !has_shape_ || !has_offsets_) {
          return Fail("lacks dtype, shape or data_offsets");
        }
        place_ = Place::kTop;
        return true;
      case Place::kMetadataEntries:
        place_ = Place::kTop;
        return true;
      case Place::kTop:
        place_ = Place::kEnd;
        return true;
      default:
        return Unexpected("the end of an object");
    }
  }

  bool start_array(size_t) override {
    if (place_ == Place::kShape) {
      place_ = Place::kShapeValues;
      return true;
    }
    if (place_ == Place::kOffsets) {
      place_ = Place::kOffsetValues;
      offsets_.clear();
      return true;
    }
    return Unexpected("an array");
  }

  bool end_array() override {
    if (place_ == Place::kShapeValues) {
      place_ = Place::kTensor;
      return true;
    }
    if (place_ != Place::kOffsetValues) return Unexpected("the end of an array");
    place_ = Place::kTensor;
    if (offsets_.size() != 2 || offsets_[1] < offsets_[0]) {
      return Fail("has data_offsets that are no range");
    }
    // The offset is relative to the end of the header until PlaceTensors().
    tensors_.back().offset = offsets_[0];
    tensors_.back().bytes = offsets_[1] - offsets_[0];
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kShapeValues) {
      if (tensors_.back().type.shape.size() == kDimensionsMax) return Fail("has 65 dimensions");
      tensors_.back().type.shape.push_back(value);
      return true;
    }
    if (place_ == Place::kOffsetValues && offsets_.size() < 2) {
      offsets_.push_back(value);
      return true;
    }
    return Unexpected("a number");
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadataEntries) return true;
    if (place_ != Place::kDtype) return Unexpected("a text");
    const std::optional<Dtype> dtype = DtypeFromName(value);
    if (!dtype.has_value()) return Fail(absl::StrCat("has the unknown dtype ", Quoted(value)));
    tensors_.back().type.dtype = *dtype;
    place_ = Place::kTensor;
    return true;
  }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a truth value"); }
  bool number_integer(number_integer_t) override { return Unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return Unexpected("a number that is not whole or too large");
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    if (error_.empty()) error_ = absl::StrCat("the header is no JSON at byte ", position);
    return false;
  }

 private:
  enum class Place {
    kStart,
    kTop,       // between entries
    kTopValue,  // before a tensor's object
    kTensor,    // in it, between its keys
    kDtype,
    kShape,
    kShapeValues,
    kOffsets,
    kOffsetValues,
    kMetadata,
    kMetadataEntries,
    kEnd,
  };

  bool TensorKey(const std::string& name) {
    if (name == "dtype" && !has_dtype_) {
      has_dtype_ = true;
      place_ = Place::kDtype;
      return true;
    }
    if (name == "shape" && !has_shape_) {
      has_shape_ = true;
      place_ = Place::kShape;
      return true;
    }
    if (name == "data_offsets" && !has_offsets_) {
      has_offsets_ = true;
      place_ = Place::kOffsets;
      return true;
    }
    return Fail(absl::StrCat("has an unknown or repeated key ", Quoted(name)));
  }

  bool Fail(const std::string& what) {
    error_ = absl::StrCat("tensor ", Quoted(tensors_.back().name), " ", what);
    return false;
  }

  bool Unexpected(const char* what) {
    error_ = absl::StrCat(
        "the header has ", what, " where it cannot be",
        tensors_.empty() ? ""
                         : absl::StrCat(", at or after tensor ", Quoted(tensors_.back().name)));
    return false;
  }

  Place place_ = Place::kStart;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  std::vector<uint64_t> offsets_;
  std::vector<StoredTensor> tensors_;
  std::string error_;
};

absl::Status CheckNamesAreUnique(const std::vector<StoredTensor>& tensors) {
  std::vector<const std::string*> names;
  names.reserve(tensors.size());
  for (const StoredTensor& tensor : tensors) names.push_back(&tensor.name);
  std::sort(names.begin(), names.end(),
            [](const std::string* a, const std::string* b) { return *a < *b; });
  for (size_t i = 1; i < names.size(); ++i) {
    if (*names[i - 1] == *names[i]) {
      return Broken(absl::StrCat("tensor ", Quoted(*names[i]), " stands in the header twice"));
    }
  }
  return absl::OkStatus();
}

// Sorts the tensors by offset, checks that they fill the data exactly, and makes the offsets
// relative to the start of the file.
absl::Status PlaceTensors(uint64_t header_end, uint64_t file_bytes,
                          std::vector<StoredTensor>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  uint64_t expected = 0;
  for (StoredTensor& tensor : tensors) {
    const std::optional<uint64_t> bytes = TensorBytes(tensor.type.dtype, tensor.type.shape);
    if (bytes != tensor.bytes) {
      return Broken(absl::StrCat("tensor ", Quoted(tensor.name), " has ", tensor.bytes,
                                 " bytes, which is not ", TensorTypeText(tensor.type)));
    }
    if (tensor.offset != expected) {
      return Broken(absl::StrCat("tensor ", Quoted(tensor.name), " starts at byte ", tensor.offset,
                                 " of the data and not at ", expected));
    }
    expected = tensor.offset + tensor.bytes;  // offset + bytes is the header's own end offset
    tensor.offset += header_end;
  }
  if (expected != file_bytes - header_end) {
    return Broken(absl::StrCat("the file has ", file_bytes - header_end,
                               " bytes of data and its header speaks of ", expected));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadStart(const ReadableFile& file) {
  char length[kLengthBytes];
  if (file.size() < kLengthBytes) {
    return Broken(absl::StrCat("the file has ", file.size(), " bytes, too few for a header"));
  }
  DDP_RETURN_IF_ERROR(file.Read(0, length, kLengthBytes));
  DDP_ASSIGN_OR_RETURN(const uint64_t end, SafetensorsHeaderEnd(length, file.size()));
  // The length is not read again: a file that changes meanwhile could give another length.
  std::string start(length, kLengthBytes);
  start.resize(end);
  DDP_RETURN_IF_ERROR(
      file.Read(kLengthBytes, start.data() + kLengthBytes, start.size() - kLengthBytes));
  return start;
}

// Reads tile by tile, so that both hashers find the bytes in the cache.
absl::Status ReadData(const ReadableFile& file, ContentHasher& file_hasher, LoadedFile& loaded) {
  char* destination = loaded.data.get();
  for (const StoredTensor& tensor : loaded.stored) {
    ContentHasher hasher;
    loaded.tensors.push_back({tensor.name, tensor.type, destination, tensor.bytes});
    uint64_t done = 0;
    while (done < tensor.bytes) {
      const size_t count = static_cast<size_t>(std::min<uint64_t>(tensor.bytes - done, kTileBytes));
      DDP_RETURN_IF_ERROR(file.Read(tensor.offset + done, destination, count));
      file_hasher.Update(destination, count);
      hasher.Update(destination, count);
      destination += count;
      done += count;
    }
    loaded.hashes.push_back(hasher.Digest());
  }
  return absl::OkStatus();
}

absl::StatusOr<LoadedFile> Load(const ReadableFile& file) {
  DDP_ASSIGN_OR_RETURN(const std::string start, ReadStart(file));
  LoadedFile loaded;
  loaded.bytes = file.size();
  DDP_ASSIGN_OR_RETURN(loaded.stored, ParseSafetensorsHeader(start, file.size()));
  const uint64_t data_bytes = file.size() - start.size();
  loaded.data.reset(new (std::nothrow) char[data_bytes]);
  if (loaded.data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", data_bytes, " bytes"));
  }
  ContentHasher hasher;
  hasher.Update(start.data(), start.size());
  DDP_RETURN_IF_ERROR(ReadData(file, hasher, loaded));
  loaded.hash = hasher.Digest();
  return loaded;
}

}  // namespace

absl::StatusOr<uint64_t> SafetensorsHeaderEnd(const char first_bytes[8], uint64_t file_bytes) {
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= static_cast<uint64_t>(static_cast<unsigned char>(first_bytes[i])) << (8 * i);
  }
  if (length > kHeaderBytesMax) {
    return Broken(absl::StrCat("the header claims ", length, " bytes; the format's bound is ",
                               kHeaderBytesMax));
  }
  if (file_bytes < kLengthBytes || length > file_bytes - kLengthBytes) {
    return Broken(absl::StrCat("the header claims ", length, " bytes, the file has ", file_bytes));
  }
  return kLengthBytes + length;
}

absl::StatusOr<std::vector<StoredTensor>> ParseSafetensorsHeader(const std::string& start,
                                                                 uint64_t file_bytes) {
  if (start.size() < kLengthBytes) return Broken("too few bytes for a header");
  DDP_ASSIGN_OR_RETURN(const uint64_t end, SafetensorsHeaderEnd(start.data(), file_bytes));
  if (start.size() < end) return Broken("the header is cut off");
  if (end == kLengthBytes || start[kLengthBytes] != '{') {
    return Broken("the header does not start with \"{\"");
  }
  HeaderHandler handler;
  if (!nlohmann::json::sax_parse(start.begin() + kLengthBytes,
                                 start.begin() + static_cast<int64_t>(end), &handler)) {
    return Broken(handler.error());
  }
  std::vector<StoredTensor> tensors = handler.TakeTensors();
  DDP_RETURN_IF_ERROR(CheckNamesAreUnique(tensors));
  DDP_RETURN_IF_ERROR(PlaceTensors(end, file_bytes, tensors));
  return tensors;
}

absl::StatusOr<LoadedFile> LoadSafetensors(const ReadableFile& file, const std::string& name) {
  absl::StatusOr<LoadedFile> loaded = Load(file);
  if (loaded.ok()) return loaded;
  return absl::Status(loaded.status().code(), absl::StrCat(name, ": ", loaded.status().message()));
}

}  // namespace ddp::elastic
