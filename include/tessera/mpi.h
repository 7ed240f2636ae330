#pragma once

// Makes groups of the ranks of an MPI communicator. Compile the including file with the <mpi.h> of the program's MPI,
// and link the program to that MPI. Tessera itself links to no MPI. Works with any MPI of version 3.0 or later.
//
//   MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
//   auto comm = tessera::communicator_from_mpi(MPI_COMM_WORLD);

#include <mpi.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/errors.h>
#include <tessera/launch.h>

namespace tessera {
namespace internal {

// Sends Tessera's messages on a duplicate of the communicator, so that they never match the program's messages.
class MpiLibrary : public MessageLibrary {
 public:
  // Collective over `comm`. Throws std::invalid_argument if `comm` is not usable. Throws CommError if not all ranks of
  // `comm` call the constructor within the timeout.
  MpiLibrary(MPI_Comm comm, std::chrono::milliseconds timeout) {
    require_usable(comm);
    duplicate(comm, timeout);
    // Makes failed calls on the duplicate return an error code. The program's communicator keeps its own handler.
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    find_host();
    int* most = nullptr;
    int is_set = 0;
    MPI_Comm_get_attr(comm_, MPI_TAG_UB, static_cast<void*>(&most), &is_set);
    most_tag_ = is_set != 0 ? *most : 32767;  // MPI guarantees at least this upper bound
  }
  ~MpiLibrary() override { release(); }
  MpiLibrary(const MpiLibrary&) = delete;
  MpiLibrary& operator=(const MpiLibrary&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int most_tag() const override { return most_tag_; }
  std::string host() const override { return host_; }

  std::vector<std::string> exchange(const std::string& own) override {
    const auto count = static_cast<size_t>(size_);
    std::vector<int> lengths(count), begins(count);
    const int length = static_cast<int>(own.size());
    require(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, comm_), "MPI_Allgather");
    for (size_t rank = 1; rank < count; ++rank) begins[rank] = begins[rank - 1] + lengths[rank - 1];
    std::vector<char> all(static_cast<size_t>(begins.back() + lengths.back()) + 1);
    require(MPI_Allgatherv(own.data(), length, MPI_CHAR, all.data(), lengths.data(), begins.data(), MPI_CHAR, comm_),
            "MPI_Allgatherv");
    std::vector<std::string> texts;
    for (size_t rank = 0; rank < count; ++rank)
      texts.emplace_back(all.data() + begins[rank], static_cast<size_t>(lengths[rank]));
    return texts;
  }

  std::unique_ptr<Request> start(void* data, int bytes, int peer, int tag, bool is_send) override {
    require_may_call();
    MPI_Request request = MPI_REQUEST_NULL;
    if (is_send)
      require(MPI_Isend(data, bytes, MPI_BYTE, peer, tag, comm_, &request), "MPI_Isend");
    else
      require(MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, comm_, &request), "MPI_Irecv");
    return std::make_unique<MpiRequest>(request, is_send ? 0 : bytes);
  }

  static void require(int code, const char* function) {
    if (code != MPI_SUCCESS) throw std::runtime_error(std::string(function) + ": " + text_of_code(code));
  }
  static std::string text_of_code(int code) {
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(code, text, &length);
    return {text, static_cast<size_t>(length)};
  }

 private:
  void release() {
    int is_finalized = 0;
    MPI_Finalized(&is_finalized);
    if (is_finalized == 0 && may_call()) MPI_Comm_free(&comm_);
  }

  // Never frees an incomplete request: any thread may destroy a broken group, but only the rank's thread may call MPI.
  class MpiRequest : public Request {
   public:
    MpiRequest(MPI_Request request, int expected_bytes) : request_(request), expected_bytes_(expected_bytes) {}
    bool is_complete() override {
      if (request_ == MPI_REQUEST_NULL) return true;
      require_may_call();
      int is_complete = 0;
      MPI_Status status;
      require(MPI_Test(&request_, &is_complete, &status), "MPI_Test");
      if (is_complete != 0 && expected_bytes_ > 0) {
        int bytes = 0;
        MPI_Get_count(&status, MPI_BYTE, &bytes);
        if (bytes != expected_bytes_)
          throw std::runtime_error("it has sent " + std::to_string(bytes) + " bytes where this rank expects " +
                                   std::to_string(expected_bytes_));
      }
      return is_complete != 0;
    }

   private:
    MPI_Request request_;
    const int expected_bytes_;
  };

  static constexpr char kWho[] = "tessera::communicator_from_mpi: ";

  // While an object exists, failed calls on MPI_COMM_WORLD and MPI_COMM_SELF return error codes. MPI reports an invalid
  // handle to the error handler of one of these two.
  class ErrorsReturned {
   public:
    ErrorsReturned() {
      for (int i = 0; i < 2; ++i) {
        MPI_Comm_get_errhandler(comm(i), &before_[i]);
        MPI_Comm_set_errhandler(comm(i), MPI_ERRORS_RETURN);
      }
    }
    ~ErrorsReturned() { restore(); }
    ErrorsReturned(const ErrorsReturned&) = delete;
    ErrorsReturned& operator=(const ErrorsReturned&) = delete;

   private:
    void restore() {
      for (int i = 0; i < 2; ++i) {
        MPI_Comm_set_errhandler(comm(i), before_[i]);
        MPI_Errhandler_free(&before_[i]);
      }
    }
    static MPI_Comm comm(int i) { return i == 0 ? MPI_COMM_WORLD : MPI_COMM_SELF; }
    MPI_Errhandler before_[2];
  };

  static bool may_call() {
    static const bool any_thread_may = [] {
      int level = MPI_THREAD_SINGLE;
      MPI_Query_thread(&level);
      return level >= MPI_THREAD_SERIALIZED;
    }();
    int is_main = 1;
    if (!any_thread_may) MPI_Is_thread_main(&is_main);
    return is_main != 0;
  }
  // Throws std::runtime_error if MPI is finalized or this thread may not call MPI. MPI itself would end the process.
  static void require_may_call() {
    int is_finalized = 0;
    MPI_Finalized(&is_finalized);
    if (is_finalized != 0)
      throw std::runtime_error("MPI is finalized; expected the group to be destroyed before MPI_Finalize()");
    if (!may_call())
      throw std::runtime_error(
          "this thread may not call MPI, which was initialized with less than MPI_THREAD_SERIALIZED by another thread");
  }

  static void require_usable(MPI_Comm comm) {
    const auto fail = [](const std::string& why) { throw std::invalid_argument(kWho + why); };
    int is_initialized = 0, is_finalized = 0;
    MPI_Initialized(&is_initialized);
    MPI_Finalized(&is_finalized);
    if (is_initialized == 0) fail("MPI is not initialized; call MPI_Init_thread() first");
    if (is_finalized != 0) fail("MPI is finalized");
    if (comm == MPI_COMM_NULL) fail("the communicator is MPI_COMM_NULL");
    if (!may_call())
      fail(
          "this thread may not call MPI; expected the thread that called MPI_Init_thread(), or "
          "MPI_THREAD_SERIALIZED");
#ifdef OPEN_MPI
    // In Open MPI, a handle is an address, which must not be read after the communicator was freed. So searches Open
    // MPI's table of Fortran handles, which contains only live communicators.
    bool is_live = false;
    for (MPI_Fint i = 0; i < (1 << 16) && !is_live; ++i) is_live = MPI_Comm_f2c(i) == comm;
    if (!is_live) fail("the communicator is not valid, perhaps because it was freed (it is not in Open MPI's table)");
#endif
    const ErrorsReturned errors;
    int is_inter = 0;
    if (const int code = MPI_Comm_test_inter(comm, &is_inter); code != MPI_SUCCESS)
      fail("the communicator is not valid, perhaps because it was freed (" + text_of_code(code) + ")");
    if (is_inter != 0) fail("the communicator is an inter-communicator; expected one group of ranks");
  }

  void duplicate(MPI_Comm comm, std::chrono::milliseconds timeout) {
    MPI_Request request = MPI_REQUEST_NULL;
    const auto until = std::chrono::steady_clock::now() + timeout;
    auto made = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
    // Not MPI_Comm_dup(), which would block forever if another rank does not call it.
    require(MPI_Comm_idup(comm, made.get(), &request), "MPI_Comm_idup");
    for (int is_complete = 0;;) {
      require(MPI_Test(&request, &is_complete, MPI_STATUS_IGNORE), "MPI_Test");
      if (is_complete != 0) {
        comm_ = *made;
        return;
      }
      if (std::chrono::steady_clock::now() >= until) {
        (void)made.release();  // leaks the handle, because MPI may still write to it
        throw CommError(kWho + std::string("not all ranks of the communicator have called it within ") +
                        std::to_string(timeout.count()) + " ms");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  void find_host() {
    MPI_Comm host = MPI_COMM_NULL;
    require(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), "MPI_Comm_split_type");
    int first = 0;
    const int code = MPI_Allreduce(&rank_, &first, 1, MPI_INT, MPI_MIN, host);
    MPI_Comm_free(&host);
    require(code, "MPI_Allreduce");
    host_ = "host of rank " + std::to_string(first);
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, most_tag_ = 0;
  std::string host_;
};

}  // namespace internal

// Makes a group of the ranks of an MPI communicator, with the same rank numbers. The rendezvous uses MPI, which also
// finds the ranks of each host. With GroupOptions::backend "mpi", MPI transfers the data, too. Otherwise data moves
// through shared memory within a host and TCP between hosts, or through NCCL. Ranks that all share memory open no port.
//
// Collective over `comm`, which may be freed afterwards, because Tessera uses a duplicate. With "mpi", the group keeps
// the duplicate, and must be destroyed before MPI_Finalize(). Operations of the group and the program's own MPI calls
// may be interleaved. MPI_THREAD_FUNNELED is enough: only the calling thread calls MPI, in this function and, with
// "mpi", in operations of the group.
//
// Makes no process-wide change (ProcessSetup). Throws std::invalid_argument if this thread may not call MPI, if the
// communicator is null, freed or an inter-communicator, and on every rank for invalid or unequal options. MPI may not
// detect every freed communicator. Throws CommError if not all ranks call this function within the timeout.
inline std::shared_ptr<Communicator> communicator_from_mpi(MPI_Comm comm, GroupOptions options = {}) {
  auto library = std::make_shared<internal::MpiLibrary>(comm, internal::time_to_meet(options.timeout));
  return internal::communicator_from_library(std::move(library), std::move(options));
}

// Like communicator_from_mpi(), for a Fortran handle: an integer, or mpi_f08's comm%MPI_VAL.
inline std::shared_ptr<Communicator> communicator_from_mpi_f(MPI_Fint comm, GroupOptions options = {}) {
  return communicator_from_mpi(MPI_Comm_f2c(comm), std::move(options));
}

}  // namespace tessera
