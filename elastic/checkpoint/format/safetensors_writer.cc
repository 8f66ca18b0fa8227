#include "elastic/checkpoint/format/safetensors_writer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/format/strict_json.h"
#include "glog/logging.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

constexpr uint64_t kHeaderBytesMax = 100'000'000;  // of the format
constexpr size_t kLengthBytes = 8;

// The buffer is large, so that the disk gets long writes. A tile is small, so that its bytes stay
// in the cache between copy and hash.
constexpr size_t kBufferBytes = size_t{8} << 20;
constexpr size_t kTileBytes = size_t{256} << 10;

std::string LittleEndian(uint64_t value) {
  std::string text;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    text.push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
  return text;
}

// Appends to a file in long writes. Hashes the whole file and, where the caller passes a hasher,
// the appended part.
class HashingAppender {
 public:
  explicit HashingAppender(WritableFile& file)
      : file_(file), buffer_(std::make_unique_for_overwrite<char[]>(kBufferBytes)) {}

  absl::Status Append(const char* data, uint64_t bytes, ContentHasher* part) {
    while (bytes > 0) {
      const size_t count =
          static_cast<size_t>(std::min<uint64_t>({bytes, kTileBytes, kBufferBytes - buffered_}));
      // The hashers read the copy that is written, because the tensor may change at any moment.
      char* const copy = buffer_.get() + buffered_;
      std::memcpy(copy, data, count);
      file_hash_.Update(copy, count);
      if (part != nullptr) part->Update(copy, count);
      buffered_ += count;
      data += count;
      bytes -= count;
      if (buffered_ == kBufferBytes) DDP_RETURN_IF_ERROR(Flush());
    }
    return absl::OkStatus();
  }

  absl::Status Flush() {
    DDP_RETURN_IF_ERROR(file_.Append(buffer_.get(), buffered_));
    buffered_ = 0;
    return absl::OkStatus();
  }

  ContentHash FileHash() const { return file_hash_.Digest(); }

 private:
  WritableFile& file_;
  ContentHasher file_hash_;
  std::unique_ptr<char[]> buffer_;
  size_t buffered_ = 0;
};

}  // namespace

absl::StatusOr<std::string> EncodeSafetensorsHeader(const std::vector<TensorView>& tensors) {
  nlohmann::json header = nlohmann::json::object();
  // PyTorch's own readers look for this entry.
  header["__metadata__"] = {{"format", "pt"}};
  uint64_t offset = 0;
  for (const TensorView& tensor : tensors) {
    if (header.contains(tensor.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("two tensors are called \"", tensor.name, "\" in one file"));
    }
    if (!IsUtf8(tensor.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the tensor name \"", absl::CHexEscape(tensor.name),
                       "\" is no UTF-8, which the format asks for: rename the tensor"));
    }
    header[tensor.name] = {{"dtype", DtypeName(tensor.type.dtype)},
                           {"shape", tensor.type.shape},
                           {"data_offsets", {offset, offset + tensor.bytes}}};
    offset += tensor.bytes;
  }
  std::string text = header.dump();
  const uint64_t unpadded = kLengthBytes + text.size();
  const uint64_t padded =
      (unpadded + kSafetensorsAlignment - 1) / kSafetensorsAlignment * kSafetensorsAlignment;
  text.append(padded - unpadded, ' ');
  if (text.size() > kHeaderBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the names of ", tensors.size(), " tensors take ", text.size(),
                     " bytes; one safetensors file takes ", kHeaderBytesMax));
  }
  return LittleEndian(text.size()) + text;
}

std::vector<TensorView> InFileOrder(std::vector<TensorView> tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorView& a, const TensorView& b) {
    const uint64_t a_bytes = DtypeBytes(a.type.dtype);
    const uint64_t b_bytes = DtypeBytes(b.type.dtype);
    return std::tie(b_bytes, a.name) < std::tie(a_bytes, b.name);
  });
  return tensors;
}

absl::StatusOr<WrittenFile> WriteSafetensors(FileSystem& file_system, const std::string& path,
                                             std::vector<TensorView> tensors) {
  tensors = InFileOrder(std::move(tensors));
  DDP_ASSIGN_OR_RETURN(const std::string header, EncodeSafetensorsHeader(tensors));
  WrittenFile written;
  written.bytes = header.size();
  for (const TensorView& tensor : tensors) {
    CHECK(TensorBytes(tensor.type.dtype, tensor.type.shape) == tensor.bytes)
        << tensor.name << ": " << tensor.bytes << " bytes for " << TensorTypeText(tensor.type);
    CHECK(tensor.data != nullptr || tensor.bytes == 0) << tensor.name << " has no values here";
    written.bytes += tensor.bytes;
  }

  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, file_system.CreateFile(path));
  DDP_RETURN_IF_ERROR(file->Reserve(written.bytes));
  HashingAppender appender(*file);
  DDP_RETURN_IF_ERROR(appender.Append(header.data(), header.size(), nullptr));
  uint64_t offset = header.size();
  for (const TensorView& tensor : tensors) {
    ContentHasher hasher;
    DDP_RETURN_IF_ERROR(appender.Append(tensor.data, tensor.bytes, &hasher));
    written.tensors.push_back({tensor.name, tensor.type, offset, tensor.bytes, hasher.Digest()});
    offset += tensor.bytes;
  }
  DDP_RETURN_IF_ERROR(appender.Flush());
  DDP_RETURN_IF_ERROR(file->Sync());
  DDP_RETURN_IF_ERROR(file->Close());
  written.hash = appender.FileHash();
  return written;
}

}  // namespace ddp::elastic
