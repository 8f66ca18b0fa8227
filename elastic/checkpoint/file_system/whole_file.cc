#include "elastic/checkpoint/file_system/whole_file.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::elastic {

absl::Status WriteWholeFile(FileSystem& file_system, const std::string& path,
                            const std::string& text) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, file_system.CreateFile(path));
  DDP_RETURN_IF_ERROR(file->Append(text.data(), text.size()));
  DDP_RETURN_IF_ERROR(file->Sync());
  return file->Close();
}

absl::StatusOr<std::string> ReadWholeFile(FileSystem& file_system, const std::string& path,
                                          uint64_t bytes_max) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<ReadableFile> file, file_system.OpenFile(path));
  if (file->size() > bytes_max) {
    return absl::DataLossError(absl::StrCat(path, " has ", file->size(), " bytes"));
  }
  std::string text(file->size(), '\0');
  DDP_RETURN_IF_ERROR(file->Read(0, text.data(), text.size()));
  return text;
}

}  // namespace ddp::elastic
