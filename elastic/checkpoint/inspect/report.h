#ifndef DDP_ELASTIC_CHECKPOINT_INSPECT_REPORT_H_
#define DDP_ELASTIC_CHECKPOINT_INSPECT_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/inspect/difference.h"
#include "elastic/checkpoint/inspect/folder_listing.h"
#include "elastic/checkpoint/inspect/prune.h"
#include "elastic/checkpoint/inspect/verification.h"

namespace ddp::elastic {

// Shows what the tools of this room have found, as tables for a terminal and as JSON. Pure. Names
// from a disk cannot steer the terminal: bytes that are not printable are shown as "?" in a table.
// A JSON text is one line, and ends with a newline; docs/checkpoints.md lists its fields.

// Returns "512 B", "1.5 MB": powers of 1000.
std::string BytesText(uint64_t bytes);

// `now`: seconds since 1970, for the ages.
std::string ListingTable(const std::string& root, const FolderListing& listing, int64_t now);
std::string ListingJson(const std::string& root, const FolderListing& listing);

std::string ManifestTable(const std::string& folder, const Manifest& manifest);
std::string ManifestJson(const std::string& folder, const Manifest& manifest);

std::string VerificationTable(const std::vector<Verification>& verifications);
std::string VerificationJson(const std::vector<Verification>& verifications);

std::string DifferenceTable(const CheckpointDifference& difference);
std::string DifferenceJson(const CheckpointDifference& difference);

std::string PruneTable(const PruneResult& result);
std::string PruneJson(const PruneResult& result);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_INSPECT_REPORT_H_
