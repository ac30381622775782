"""The commands, a module each: flags to one public function."""
