// The weights of an operator in memory of our own: in large pages, from the beginning of a cache line on, and once for
// all graphs of a process that have the same ones. A graph's own constants lie wherever its file has them, in small
// pages: finding out where these are takes up to half of the time that reading the weights takes.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

namespace {

class Weights {
public:
    // Return the copy of the weights at an address, made at the first call, or themselves if there is no room.
    const uint8_t* at(const uint8_t* given, size_t size) {
        std::call_once(once_, [&] { copy_ = shared_copy(given, size); });
        return copy_ ? copy_.get() : given;
    }

private:
    using Copy = std::shared_ptr<const uint8_t>;
    static constexpr size_t LINE = 64, PAGE = size_t{1} << 21, SLAB = 16 * PAGE, SHARE = 8;  // SHARE: of the memory

    // Memory in large pages, which copies are placed in one behind the other. It goes when the last one goes.
    struct Slab {
        uint8_t* begin = nullptr;
        size_t size = 0, used = 0;

        explicit Slab(size_t wanted) {
            size = (wanted + PAGE - 1) / PAGE * PAGE + PAGE;
            void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (found == MAP_FAILED) return;
            begin = static_cast<uint8_t*>(found);
            used = PAGE - reinterpret_cast<uintptr_t>(begin) % PAGE;
            madvise(begin + used, size - used, MADV_HUGEPAGE);  // a system without them goes on with small ones
            held() += size;
        }
        ~Slab() {
            if (begin == nullptr) return;
            munmap(begin, size);
            held() -= size;
        }
        Slab(const Slab&) = delete;
        Slab& operator=(const Slab&) = delete;

        bool has(size_t wanted) const { return begin != nullptr && size - used >= wanted; }
        static std::atomic<size_t>& held() {
            static std::atomic<size_t> bytes{0};
            return bytes;
        }
    };

    // Return how many bytes copies may take together.
    static size_t most() {
        size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
        size_t limit = 0;  // of a container; the file has a word in it if there is none
        if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit) memory = std::min(memory, limit);
        return memory / SHARE;
    }

    static Copy shared_copy(const uint8_t* given, size_t size) {
        static std::mutex lock;
        static std::multimap<size_t, std::weak_ptr<const uint8_t>> copies;  // by size
        static std::weak_ptr<Slab> latest;
        const std::lock_guard<std::mutex> guard(lock);
        const auto [first, end] = copies.equal_range(size);
        for (auto one = first; one != end;) {
            const Copy copy = one->second.lock();
            // Others of a size differ in their first bytes, so that comparing takes no time.
            if (copy && std::memcmp(copy.get(), given, size) == 0) return copy;
            one = copy ? std::next(one) : copies.erase(one);
        }
        const size_t wanted = (size + LINE - 1) / LINE * LINE;
        auto slab = latest.lock();
        if (slab == nullptr || !slab->has(wanted)) {
            if (Slab::held() + std::max(SLAB, wanted) > most()) return nullptr;
            slab = std::make_shared<Slab>(std::max(SLAB, wanted));
            if (!slab->has(wanted)) return nullptr;
            latest = slab;
        }
        uint8_t* place = slab->begin + slab->used;
        slab->used += wanted;
        std::memcpy(place, given, size);
        const Copy made(slab, place);
        copies.emplace(size, made);
        return made;
    }

    std::once_flag once_;
    Copy copy_;
};

}  // namespace
