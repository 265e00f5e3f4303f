//! [`StubLibrary`] writes a shared library of stubs as an ELF file for x86-64.
//!
//! A stub can replace any function. It leaves all arguments in place, loads the address of its
//! descriptor into a register that no argument uses, and jumps to the core library, which answers
//! the call. The descriptor begins with the function's name.
//!
//! The file has three parts: read-only data, the stubs, and writable data (`.dynamic`, the address
//! of the core's function, and the descriptors).

use object::build::elf::{
    Builder, Dynamic, DynamicRelocation, SectionData, SectionId, VersionData, VersionDef, VersionId,
};
use object::{Endianness, elf};

/// The core's function that every stub jumps to.
pub const ANSWER: &str = "harness_gpu_unmodelled";

/// A symbol of a library, with the version node of its references.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Symbol {
    pub name: String,
    pub node: Option<String>,
    pub kind: SymbolKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SymbolKind {
    Function,
    Variable,
}

#[derive(Clone, Debug)]
pub struct StubLibrary<'a> {
    pub soname: &'a str,
    /// The version nodes that it defines, including those without symbols.
    pub nodes: Vec<&'a str>,
    pub symbols: Vec<&'a Symbol>,
    /// File name of the core library in the same folder.
    pub core: &'a str,
}

const PAGE: u64 = 4096;
const STUB: usize = 16;
/// `struct Stub { name: *const c_char, known: AtomicPtr<()> }` of the core.
const DESCRIPTOR: usize = 16;
/// Space for a variable, larger than any imported one.
const VARIABLE: usize = 64;
const BLOOM_SHIFT: u32 = 6;
/// Three parts, the dynamic section and the stack.
const SEGMENTS: usize = 5;

/// The sections with contents that depend on addresses.
struct Sections {
    relocations: SectionId,
    names: SectionId,
    text: SectionId,
    dynamic: SectionId,
    got: SectionId,
    data: SectionId,
}

fn section_type(data: &SectionData<'_>) -> u32 {
    match data {
        SectionData::GnuHash => elf::SHT_GNU_HASH,
        SectionData::DynamicSymbol => elf::SHT_DYNSYM,
        SectionData::DynamicString => elf::SHT_STRTAB,
        SectionData::GnuVersym => elf::SHT_GNU_VERSYM,
        SectionData::GnuVerdef => elf::SHT_GNU_VERDEF,
        SectionData::DynamicRelocation(_) => elf::SHT_RELA,
        SectionData::Dynamic(_) => elf::SHT_DYNAMIC,
        _ => elf::SHT_PROGBITS,
    }
}

/// Adds the three parts of the file, and the headers of the dynamic section and the stack.
fn add_segments(library: &mut Builder<'_>, placed: &Sections, read_only: Vec<SectionId>) {
    // The file's headers belong to the first part.
    let headers =
        (library.file_header_size() + SEGMENTS * library.class().program_header_size()) as u64;
    let parts = [
        (0, headers, read_only),
        (elf::PF_X, 0, vec![placed.text]),
        (elf::PF_W, 0, vec![placed.dynamic, placed.got, placed.data]),
    ];
    for (flags, size, ids) in parts {
        let segment = library.segments.add_load_segment(elf::PF_R | flags, PAGE);
        (segment.p_filesz, segment.p_memsz) = (size, size);
        ids.into_iter()
            .for_each(|id| segment.append_section(library.sections.get_mut(id)));
    }
    // Without a header for the stack, it would be executable.
    for (kind, align) in [(elf::PT_DYNAMIC, 8), (elf::PT_GNU_STACK, 16)] {
        let segment = library.segments.add();
        (segment.p_type, segment.p_flags, segment.p_align) = (kind, elf::PF_R | elf::PF_W, align);
        if kind == elf::PT_DYNAMIC {
            segment.append_section(library.sections.get_mut(placed.dynamic));
        }
    }
}

impl StubLibrary<'_> {
    pub fn bytes(&self) -> Vec<u8> {
        let mut library = Builder::new(Endianness::Little, true);
        library.header.e_type = elf::ET_DYN;
        library.header.e_machine = elf::EM_X86_64;
        library.header.e_phoff = library.file_header_size() as u64;
        let count = self.symbols.len() as u32;
        library.gnu_hash_bucket_count = (count / 4).max(1);
        library.gnu_hash_bloom_count = (count / 8).next_power_of_two();
        library.gnu_hash_bloom_shift = BLOOM_SHIFT;
        let sections = self.place_sections(&mut library);
        self.fill_sections(&mut library, &sections);
        let mut bytes = Vec::new();
        library
            .write(&mut bytes)
            .expect("every section has its place");
        bytes
    }

    fn functions(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols
            .iter()
            .copied()
            .filter(|symbol| symbol.kind == SymbolKind::Function)
    }

    /// Adds all sections, symbols and segments. Contents that depend on addresses are zero, and
    /// values of symbols count from the beginning of their section.
    fn place_sections<'a>(&'a self, library: &mut Builder<'a>) -> Sections {
        let stubs = self.functions().count();
        let has_stubs = usize::from(stubs > 0);
        let mut section = |name: &'static str, flags: u32, align: usize, data: SectionData<'a>| {
            let section = library.sections.add();
            section.name = name.into();
            section.sh_type = section_type(&data);
            section.sh_flags = u64::from(elf::SHF_ALLOC | flags);
            section.sh_addralign = align as u64;
            section.data = data;
            section.id()
        };
        let zeros = |size: usize| SectionData::Data(vec![0; size].into());
        let hash = section(".gnu.hash", 0, 8, SectionData::GnuHash);
        let symbols = section(".dynsym", 0, 8, SectionData::DynamicSymbol);
        let strings = section(".dynstr", 0, 1, SectionData::DynamicString);
        let mut read_only = vec![hash, symbols, strings];
        if !self.nodes.is_empty() {
            read_only.push(section(".gnu.version", 0, 2, SectionData::GnuVersym));
            read_only.push(section(".gnu.version_d", 0, 8, SectionData::GnuVerdef));
        }
        let nowhere = DynamicRelocation {
            r_offset: 0,
            symbol: None,
            r_type: 0,
            r_addend: 0,
        };
        let relocations = SectionData::DynamicRelocation(vec![nowhere; stubs + has_stubs]);
        let names = self
            .functions()
            .flat_map(|function| function.name.bytes().chain([0]))
            .collect::<Vec<u8>>();
        let names = SectionData::Data(names.into());
        let dynamic = SectionData::Dynamic(self.dynamic(0));
        let data = zeros(stubs * DESCRIPTOR + (self.symbols.len() - stubs) * VARIABLE);
        let placed = Sections {
            relocations: section(".rela.dyn", 0, 8, relocations),
            names: section(".rodata", 0, 1, names),
            text: section(".text", elf::SHF_EXECINSTR, STUB, zeros(stubs * STUB)),
            dynamic: section(".dynamic", elf::SHF_WRITE, 8, dynamic),
            got: section(".got", elf::SHF_WRITE, 8, zeros(8 * has_stubs)),
            data: section(".data", elf::SHF_WRITE, VARIABLE, data),
        };
        read_only.extend([placed.relocations, placed.names]);
        let headers = library.sections.add();
        headers.name = ".shstrtab".into();
        headers.sh_type = elf::SHT_STRTAB;
        headers.data = SectionData::SectionString;
        for (id, link, size) in [
            (placed.relocations, symbols, 24),
            (placed.dynamic, strings, 16),
        ] {
            let section = library.sections.get_mut(id);
            (section.sh_link_section, section.sh_entsize) = (Some(link), size);
        }
        self.add_symbols(library, &placed);
        library.set_section_sizes();
        add_segments(library, &placed, read_only);
        placed
    }

    fn add_symbols<'a>(&'a self, library: &mut Builder<'a>, sections: &Sections) {
        let mut versions = Vec::new();
        if !self.nodes.is_empty() {
            library.version_base = Some(self.soname.into());
        }
        for &node in &self.nodes {
            let version = library.versions.add(VersionData::Def(VersionDef {
                names: vec![node.into()],
                flags: 0,
            }));
            versions.push((node, version));
            // Like the GNU linker, because nodes without symbols are not written.
            let symbol = library.dynamic_symbols.add();
            symbol.set_st_info(elf::STB_GLOBAL, elf::STT_OBJECT);
            (symbol.name, symbol.version, symbol.st_shndx) = (node.into(), version, elf::SHN_ABS);
        }
        let (mut stub, mut variable) = (0, (self.functions().count() * DESCRIPTOR) as u64);
        for symbol in &self.symbols {
            let (place, section, kind, size) = match symbol.kind {
                SymbolKind::Function => (&mut stub, sections.text, elf::STT_FUNC, STUB as u64),
                SymbolKind::Variable => (
                    &mut variable,
                    sections.data,
                    elf::STT_OBJECT,
                    VARIABLE as u64,
                ),
            };
            let version = versions
                .iter()
                .find(|(node, _)| Some(*node) == symbol.node.as_deref())
                .map(|(_, version)| *version);
            let added = library.dynamic_symbols.add();
            added.set_st_info(elf::STB_GLOBAL, kind);
            (added.name, added.version) = (
                symbol.name.as_str().into(),
                version.unwrap_or(VersionId::global()),
            );
            // The writer replaces the index by that of the section.
            (added.section, added.st_shndx) = (Some(section), elf::SHN_ABS);
            (added.st_value, added.st_size) = (*place, size);
            *place += size;
        }
        if self.functions().next().is_some() {
            let answer = library.dynamic_symbols.add();
            answer.set_st_info(elf::STB_GLOBAL, elf::STT_NOTYPE);
            (answer.name, answer.version) = (ANSWER.into(), VersionId::global());
        }
    }

    /// Returns the dynamic section, given the address of the relocations.
    fn dynamic(&self, relocations: u64) -> Vec<Dynamic<'_>> {
        let stubs = self.functions().count() as u64;
        let text = |tag: u32, text: &'static str| Dynamic::String {
            tag,
            val: text.into(),
        };
        let integer = |tag: u32, val: u64| Dynamic::Integer { tag, val };
        let mut entries = vec![
            Dynamic::String {
                tag: elf::DT_NEEDED,
                val: self.core.into(),
            },
            Dynamic::String {
                tag: elf::DT_SONAME,
                val: self.soname.into(),
            },
            // Not DT_RUNPATH: LD_LIBRARY_PATH takes precedence over it and may contain another
            // core.
            text(elf::DT_RPATH, "$ORIGIN"),
        ];
        entries.extend(
            [
                elf::DT_GNU_HASH,
                elf::DT_STRTAB,
                elf::DT_SYMTAB,
                elf::DT_STRSZ,
            ]
            .map(|tag| Dynamic::Auto { tag }),
        );
        entries.extend([
            integer(elf::DT_SYMENT, 24),
            integer(elf::DT_RELA, relocations),
            integer(elf::DT_RELASZ, 24 * (stubs + u64::from(stubs > 0))),
            integer(elf::DT_RELAENT, 24),
            integer(elf::DT_RELACOUNT, stubs),
        ]);
        if !self.nodes.is_empty() {
            entries.extend(
                [elf::DT_VERSYM, elf::DT_VERDEF, elf::DT_VERDEFNUM]
                    .map(|tag| Dynamic::Auto { tag }),
            );
        }
        entries
    }

    /// Writes everything that depends on addresses.
    fn fill_sections<'a>(&'a self, library: &mut Builder<'a>, sections: &Sections) {
        let address = |id: SectionId| library.sections.get(id).sh_addr;
        let [names, text, got, data] =
            [sections.names, sections.text, sections.got, sections.data].map(address);
        let dynamic = self.dynamic(address(sections.relocations));
        let mut name = names;
        let (mut relocations, mut stubs) = (Vec::new(), Vec::new());
        for (index, function) in self.functions().enumerate() {
            let (stub, descriptor) = (
                text + (index * STUB) as u64,
                data + (index * DESCRIPTOR) as u64,
            );
            // Both targets follow the stubs within a few pages, so the distances are small and
            // positive.
            let (to_descriptor, to_answer) =
                ((descriptor - (stub + 7)) as u32, (got - (stub + 13)) as u32);
            stubs.extend([0x4c, 0x8d, 0x1d]); // lea r11, [rip + …]
            stubs.extend(to_descriptor.to_le_bytes());
            stubs.extend([0xff, 0x25]); // jmp [rip + …]
            stubs.extend(to_answer.to_le_bytes());
            stubs.extend([0xcc; 3]);
            relocations.push(DynamicRelocation {
                r_offset: descriptor,
                symbol: None,
                r_type: elf::R_X86_64_RELATIVE,
                r_addend: name as i64,
            });
            name += function.name.len() as u64 + 1;
        }
        // Relative relocations come first, as DT_RELACOUNT requires.
        let answer = library
            .dynamic_symbols
            .iter()
            .find(|symbol| symbol.st_shndx == elf::SHN_UNDEF)
            .map(|symbol| symbol.id());
        relocations.extend(answer.map(|_| DynamicRelocation {
            r_offset: got,
            symbol: answer,
            r_type: elf::R_X86_64_GLOB_DAT,
            r_addend: 0,
        }));
        for symbol in &mut library.dynamic_symbols {
            symbol.st_value += symbol
                .section
                .map_or(0, |section| library.sections.get(section).sh_addr);
        }
        library.sections.get_mut(sections.relocations).data =
            SectionData::DynamicRelocation(relocations);
        library.sections.get_mut(sections.text).data = SectionData::Data(stubs.into());
        library.sections.get_mut(sections.dynamic).data = SectionData::Dynamic(dynamic);
    }
}

#[cfg(test)]
mod tests;
