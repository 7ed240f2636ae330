#pragma once

// Names the mutex that must be held to access a data member: `int count_ TESSERA_GUARDED_BY(mutex_) = 0;`. Clang's
// -Wthread-safety checks the accesses; other compilers ignore the macro.
#ifdef __clang__
#define TESSERA_GUARDED_BY(mutex) __attribute__((guarded_by(mutex)))
#else
#define TESSERA_GUARDED_BY(mutex)
#endif
