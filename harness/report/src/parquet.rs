//! Tables as Parquet files, for questions in SQL.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parquet::basic::{Compression, LogicalType, Repetition, Type as Physical};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, Int64Type};
use parquet::errors::Result;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::{Type, TypePtr};

/// Rows per group, which a reader holds in memory.
const GROUP: usize = 65_536;

/// A kind of table.
pub(crate) struct Table<'a, R> {
    pub(crate) name: &'static str,
    /// The version of the columns. The file has it under the key `harness_NAME_version` of its
    /// metadata.
    pub(crate) version: u32,
    pub(crate) columns: &'a [(&'static str, Column<R>)],
}

pub(crate) enum Column<R> {
    Text(fn(&R) -> Option<&str>),
    Number(fn(&R) -> Option<u64>),
    Flag(fn(&R) -> Option<bool>),
    Texts(fn(&R) -> Vec<&str>),
    /// A group with a text for each key that a row has.
    Map(fn(&R) -> &BTreeMap<String, String>),
}

impl<R> Table<'_, R> {
    pub(crate) fn file(&self, rows: &[R]) -> Result<Vec<u8>> {
        let fields = self
            .columns
            .iter()
            .map(|(name, column)| column.field(name, rows));
        // A group has at least one field.
        let fields = fields
            .filter_map(Result::transpose)
            .collect::<Result<_>>()?;
        let schema = Type::group_type_builder(self.name)
            .with_fields(fields)
            .build()?;
        let version = KeyValue::new(
            format!("harness_{}_version", self.name),
            self.version.to_string(),
        );
        let properties = WriterProperties::builder()
            .set_compression(Compression::GZIP(Default::default()))
            .set_key_value_metadata(Some(vec![version]))
            .build();
        let mut writer =
            SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties))?;
        let keys: Vec<BTreeSet<&str>> = self.columns.iter().map(|(_, of)| of.keys(rows)).collect();
        for rows in rows.chunks(GROUP) {
            let mut group = writer.next_row_group()?;
            for ((_, column), keys) in self.columns.iter().zip(&keys) {
                column.write(&mut group, rows, keys)?;
            }
            group.close()?;
        }
        writer.into_inner()
    }
}

impl<R> Column<R> {
    /// The keys of a group.
    fn keys<'r>(&self, rows: &'r [R]) -> BTreeSet<&'r str> {
        match *self {
            Self::Map(of) => {
                let keys = rows.iter().flat_map(|row| of(row).keys());
                keys.map(String::as_str).collect()
            }
            Self::Text(_) | Self::Number(_) | Self::Flag(_) | Self::Texts(_) => BTreeSet::new(),
        }
    }

    /// The column in the schema. `None` if it is a group without fields.
    fn field(&self, name: &str, rows: &[R]) -> Result<Option<TypePtr>> {
        let field = match self {
            Self::Text(_) => text(name, Repetition::OPTIONAL)?,
            Self::Number(_) => primitive(name, Physical::INT64)?,
            Self::Flag(_) => primitive(name, Physical::BOOLEAN)?,
            Self::Texts(_) => list(name)?,
            Self::Map(_) => {
                let keys = self.keys(rows).into_iter();
                let fields = keys.map(|key| Ok(Arc::new(text(key, Repetition::OPTIONAL)?)));
                let fields = fields.collect::<Result<Vec<_>>>()?;
                if fields.is_empty() {
                    return Ok(None);
                }
                let group = Type::group_type_builder(name).with_fields(fields);
                group.with_repetition(Repetition::REQUIRED).build()?
            }
        };
        Ok(Some(Arc::new(field)))
    }

    fn write(&self, group: &mut Group<'_>, rows: &[R], keys: &BTreeSet<&str>) -> Result<()> {
        let rows = rows.iter();
        match *self {
            Self::Text(of) => texts(group, rows.map(of)),
            Self::Number(of) => {
                optional::<Int64Type>(group, rows.map(|row| of(row).map(u64::cast_signed)))
            }
            Self::Flag(of) => optional::<BoolType>(group, rows.map(of)),
            Self::Texts(of) => repeated(group, rows.map(of)),
            Self::Map(of) => keys.iter().try_for_each(|key| {
                texts(
                    group,
                    rows.clone()
                        .map(|row| of(row).get(*key).map(String::as_str)),
                )
            }),
        }
    }
}

fn text(name: &str, repetition: Repetition) -> Result<Type> {
    Type::primitive_type_builder(name, Physical::BYTE_ARRAY)
        .with_logical_type(Some(LogicalType::String))
        .with_repetition(repetition)
        .build()
}

fn primitive(name: &str, physical: Physical) -> Result<Type> {
    Type::primitive_type_builder(name, physical)
        .with_repetition(Repetition::OPTIONAL)
        .build()
}

/// All readers know this form of a list; some fail at a plain repeated column.
fn list(name: &str) -> Result<Type> {
    let element = text("element", Repetition::REQUIRED)?;
    let repeated = Type::group_type_builder("list")
        .with_repetition(Repetition::REPEATED)
        .with_fields(vec![Arc::new(element)])
        .build()?;
    Type::group_type_builder(name)
        .with_repetition(Repetition::REQUIRED)
        .with_logical_type(Some(LogicalType::List))
        .with_fields(vec![Arc::new(repeated)])
        .build()
}

type Group<'a> = SerializedRowGroupWriter<'a, Vec<u8>>;

fn texts<'r>(group: &mut Group<'_>, values: impl Iterator<Item = Option<&'r str>>) -> Result<()> {
    optional::<ByteArrayType>(group, values.map(|value| value.map(ByteArray::from)))
}

fn optional<T: DataType>(
    group: &mut Group<'_>,
    values: impl Iterator<Item = Option<T::T>>,
) -> Result<()> {
    let (mut found, mut levels) = (Vec::new(), Vec::new());
    for value in values {
        levels.push(i16::from(value.is_some()));
        found.extend(value);
    }
    write::<T>(group, &found, &levels, None)
}

fn repeated<'r>(group: &mut Group<'_>, lists: impl Iterator<Item = Vec<&'r str>>) -> Result<()> {
    let (mut found, mut levels, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    for texts in lists {
        if texts.is_empty() {
            levels.push(0);
            repetitions.push(0);
        }
        for (index, text) in texts.iter().enumerate() {
            levels.push(1);
            repetitions.push(i16::from(index > 0));
            found.push(ByteArray::from(*text));
        }
    }
    write::<ByteArrayType>(group, &found, &levels, Some(&repetitions))
}

fn write<T: DataType>(
    group: &mut Group<'_>,
    values: &[T::T],
    levels: &[i16],
    repetitions: Option<&[i16]>,
) -> Result<()> {
    if let Some(mut column) = group.next_column()? {
        column
            .typed::<T>()
            .write_batch(values, Some(levels), repetitions)?;
        column.close()?;
    }
    Ok(())
}
