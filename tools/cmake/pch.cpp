// Holds the precompiled header that all other targets reuse (cmake/TesseraTargets.cmake).
